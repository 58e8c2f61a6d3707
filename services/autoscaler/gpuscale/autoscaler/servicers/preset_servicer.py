"""PresetService on the wire."""

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.model import ReplicaTemplate
from gpuscale.autoscaler.domain.preset_words import PARAMETERS, about
from gpuscale.autoscaler.domain.presets import PRESETS, Wish
from gpuscale.autoscaler.wire.translate import spec_to_wire
from gpuscale.autoscaler.wire.translate_presets import DEFAULT_BOUNDS, render
from gpuscale.common.security.auth import Context

_NOTHING = Wish("", *DEFAULT_BOUNDS, ReplicaTemplate(""))


class PresetServicer(api.PresetServiceServicer):
    """Shows presets, and makes specs of them."""

    async def ListPresets(self, request: api.ListPresetsRequest, context: Context) -> api.ListPresetsResponse:
        """List the presets."""
        presets = [
            api.Preset(name=name, summary=about(name), parameters=PARAMETERS[name]) for name in PRESETS
        ]
        return api.ListPresetsResponse(presets=presets)

    async def RenderPreset(
        self, request: api.RenderPresetRequest, context: Context
    ) -> api.RenderPresetResponse:
        """Return the spec that a preset makes."""
        made = render(request.wish, "wish", _NOTHING)
        return api.RenderPresetResponse(preset=made.preset, spec=spec_to_wire(made.spec), notes=made.notes)

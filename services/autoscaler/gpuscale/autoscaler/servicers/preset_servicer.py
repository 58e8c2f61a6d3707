"""PresetService on the wire."""

from typing import TypeAlias

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.model import ReplicaTemplate
from gpuscale.autoscaler.domain.preset_words import PARAMETERS, about
from gpuscale.autoscaler.domain.presets import PRESETS, Wish
from gpuscale.autoscaler.wire.translate import spec_to_wire
from gpuscale.autoscaler.wire.translate_presets import DEFAULT_BOUNDS, render

_List: TypeAlias = grpc.aio.ServicerContext[api.ListPresetsRequest, api.ListPresetsResponse]
_Render: TypeAlias = grpc.aio.ServicerContext[api.RenderPresetRequest, api.RenderPresetResponse]
_NOTHING = Wish("", *DEFAULT_BOUNDS, ReplicaTemplate(""))


class PresetServicer(api.PresetServiceServicer):
    """Shows presets, and makes specs of them."""

    async def ListPresets(self, request: api.ListPresetsRequest, context: _List) -> api.ListPresetsResponse:
        """List the presets."""
        presets = [
            api.Preset(name=name, summary=about(name), parameters=PARAMETERS[name]) for name in PRESETS
        ]
        return api.ListPresetsResponse(presets=presets)

    async def RenderPreset(
        self, request: api.RenderPresetRequest, context: _Render
    ) -> api.RenderPresetResponse:
        """Return the spec that a preset makes."""
        made = render(request.wish, "wish", _NOTHING)
        return api.RenderPresetResponse(preset=made.preset, spec=spec_to_wire(made.spec), notes=made.notes)

"""PresetService on the wire: the spec that a preset makes for a wish."""

from dataclasses import replace

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.presets import PARAMETERS, PRESETS, Named, Wish, about, expand, named
from gpuscale.autoscaler.domain.spec import EndpointSpec, ReplicaTemplate
from gpuscale.autoscaler.wire.specs import CODEC, spec_to_wire, spec_violations
from gpuscale.common.errors import FieldViolation, InvalidArgumentError, NotFoundError
from gpuscale.common.filters import listed
from gpuscale.common.names import PRESET, parse, preset_name
from gpuscale.common.rpc import validation
from gpuscale.common.security.auth import Context

DEFAULT_BOUNDS = (1, 16)
WITHOUT_WORK = frozenset({"opengris_no"})
"""Presets without signals."""
WITH_SETS = "opengris_capability"
"""The preset that scales capability sets."""


def render(wire: api.PresetWish, path: str, default: Wish) -> tuple[Named, EndpointSpec]:
    """The preset of the message at `path`, and the spec that it makes; InvalidArgumentError if it contradicts itself."""
    preset = named(wire.preset.removeprefix("presets/"), f"{path}.preset")
    if wire.watcher and wire.metric:
        raise InvalidArgumentError(f"{path}.metric cannot be combined with a watcher", field=f"{path}.metric")
    stated = CODEC.stated(Wish, wire, path)
    wish = replace(default, parameters={}, capability_sets=(), metric="")
    wish = replace(wish, **({"watcher": ""} | stated if wire.metric else stated))
    sets = bool(wish.capability_sets)
    refusals = (
        (sets and preset.name != WITH_SETS, "capability_sets", f"are of {WITH_SETS} alone"),
        (
            sets and bool(wire.watcher or wire.metric),
            "capability_sets",
            "count reported tasks: leave watcher and metric out",
        ),
        (
            not (wish.watcher or wish.metric or sets or preset.name in WITHOUT_WORK),
            "watcher",
            "must be set, or metric",
        ),
    )
    for refused, field, text in refusals:
        if refused:
            raise InvalidArgumentError(f"{path}.{field} {text}", field=f"{path}.{field}")
    spec = expand(preset.name, wish, f"{path}.parameters")
    own = (one._replace(field=one.field.removeprefix(".")) for one in spec_violations(spec, ""))
    found: list[FieldViolation] = []
    for field, description in (*validation.violations(spec_to_wire(spec)), *own):
        # The part of the wish that this part of its spec comes from.
        if field.endswith(".service_time"):
            found.append(FieldViolation(f"{path}.service_time", description))
        elif field.startswith(("template", "min_replicas", "max_replicas", "capability_sets")):
            found.append(FieldViolation(f"{path}.{field}", description))
        else:
            found.append(FieldViolation(f"{path}.parameters", f"lead to {field}, which {description}"))
    if found:
        raise InvalidArgumentError.of(found)
    return preset, spec


def _preset(name: str) -> api.Preset:
    return api.Preset(name=preset_name(name), summary=about(name), parameters=PARAMETERS[name])


_NOTHING = Wish("", *DEFAULT_BOUNDS, ReplicaTemplate(""))


class PresetServicer(api.PresetServiceServicer):
    """Shows presets, and makes specs of them."""

    async def ListPresets(self, request: api.ListPresetsRequest, context: Context) -> api.ListPresetsResponse:
        presets, token = listed(
            list(enumerate(PRESETS)),
            request,
            api.Preset,
            key=lambda one: f"{one[0]:03}",
            encode=lambda one: _preset(one[1]),
        )
        return api.ListPresetsResponse(presets=presets, next_page_token=token)

    async def GetPreset(self, request: api.GetPresetRequest, context: Context) -> api.GetPresetResponse:
        name = parse(PRESET, request.name)["preset"]
        if name not in PRESETS:
            raise NotFoundError.of(request.name)
        return api.GetPresetResponse(preset=_preset(name))

    async def RenderPreset(
        self, request: api.RenderPresetRequest, context: Context
    ) -> api.RenderPresetResponse:
        preset, spec = render(request.wish, "wish", _NOTHING)
        return api.RenderPresetResponse(
            preset=preset_name(preset.name), spec=spec_to_wire(spec), notes=preset.notes
        )

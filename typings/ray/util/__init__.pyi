from typing import TypedDict, overload

from ray.util.placement_group import PlacementGroup

class Stats(TypedDict):
    scheduling_state: str

class Row(TypedDict):
    name: str
    state: str
    stats: Stats

def get_placement_group(name: str) -> PlacementGroup: ...
def list_named_actors() -> list[str]: ...
@overload
def placement_group_table() -> dict[str, Row]: ...
@overload
def placement_group_table(placement_group: PlacementGroup) -> Row: ...

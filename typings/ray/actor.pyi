from collections.abc import Mapping

from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

class ActorMethod:
    def remote(self, *arguments: object) -> ObjectRef: ...

class ActorHandle:
    def __getattr__(self, name: str) -> ActorMethod: ...

class ActorClass:
    def options(
        self,
        *,
        name: str,
        lifetime: str,
        max_restarts: int,
        num_cpus: float,
        num_gpus: float,
        resources: Mapping[str, float],
        scheduling_strategy: PlacementGroupSchedulingStrategy,
    ) -> ActorClass: ...
    def remote(self, *arguments: object) -> ActorHandle: ...

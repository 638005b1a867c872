"""What scripts ask of an optimizer in stages 1 and 2 by parameter, while partitions are adopted.

`deepspeed.utils.safe_get_full_fp32_param` and its like gather a parameter's fragments from the ranks that
have them: an adopter gives, and sets, those of the partitions it holds as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from ft_core.patching import replaced
from ft_deepspeed import patched
from ft_deepspeed.comm import alone, only, together

_LINKS = ("_hp_mapping", "_index_in_param_group")
"""What DeepSpeed keeps with a parameter of the fragment that is in the rank's partition."""

Links = Mapping[str, Any]


def links(parameter: Any) -> Links:
    """Those of `parameter` as they are."""
    return {name: getattr(parameter, name, None) for name in _LINKS}


def share(parameter: Any, group: Any, others: Sequence[Callable[[], tuple[int, Links]]]) -> None:
    """Have the parameter's methods go by its fragments in other partitions too.

    `group`: the data-parallel peers. `others`: for each partition its rank among those and, anew each time,
    the parameter's links in it. DeepSpeed's own methods are back when it links its parameters again.
    """
    for patch in patched.FRAGMENT_GETTERS:
        patch.wrap(lambda get: _gathering(parameter, get, group, others), of=parameter)
    for patch in patched.FRAGMENT_SETTERS:
        patch.wrap(lambda put: _setting(parameter, put, others), of=parameter)


def _gathering(parameter: Any, get: Callable[..., Any], group: Any, others: Any) -> Callable[..., Any]:
    def gathered(*args: Any, **kwargs: Any) -> Any:
        peers = only(group)
        given: dict[int, list[torch.Tensor]] = {}
        for other in others:
            rank, found = other()
            given[rank] = []
            comm = alone(dist.get_rank(), rank, peers, given[rank])
            with replaced(parameter, dict(found)), patched.FRAGMENT_COMM.replaced(comm):
                get(*args, **kwargs)
        with patched.FRAGMENT_COMM.replaced(together(peers, given)):
            return get(*args, **kwargs)

    return gathered


def _setting(parameter: Any, put: Callable[..., None], others: Any) -> Callable[..., None]:
    def set_everywhere(*args: Any, **kwargs: Any) -> None:
        for other in others:
            _, found = other()
            with replaced(parameter, dict(found)):
                put(*args, **kwargs)
        put(*args, **kwargs)

    return set_everywhere

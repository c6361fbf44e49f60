"""Groups that layers of the same sizes share, for the doors of other projects, where no user makes a group."""

import torch

from ._ep_group import Group


class Shared:
    """An smoe.ep.Group that becomes larger when it has to."""

    def __init__(self, mesh, hidden: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
        self.mesh, self.group = mesh, None
        self.sizes = dict(hidden=hidden, num_experts=experts, top_k=top_k, dtype=dtype)

    def fit(self, tokens: int) -> Group:
        """The group with room for so many tokens. All ranks give the same number."""
        if self.group is None or tokens > self.group.max_tokens:
            self.grow(tokens)
        return self.group

    @torch.compiler.disable
    def grow(self, tokens: int) -> None:
        """The smaller group stays open, since a backward may need it. To bound the memory of all, each is at least twice as
        large as the one before."""
        least = 0 if self.group is None else 2 * self.group.max_tokens
        self.group = Group(self.mesh, max_tokens=max(tokens, least, 1), **self.sizes)


_kept: dict[tuple, Shared] = {}


def shared(kind: type, mesh, *sizes) -> Shared:
    """The one of this `kind` for these sizes, the arguments of Shared."""
    key = (kind, mesh.get_group(), *sizes)
    if key not in _kept:
        _kept[key] = kind(mesh, *sizes)
    return _kept[key]

"""Warning for parameters that this rank's model has lost, as after a replaced layer, while other ranks train them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

__all__ = ["MissingGradients"]

log = logging.getLogger("coordd")

_STEPS = 5
_TEXT = (
    "this rank has computed no gradient of %s (%d parameters) for %d steps in a row, while other ranks have, and no "
    "module has these parameters any more: the gradient counts as zeros here. If the script has replaced a layer or a "
    "parameter, give the new one to the optimizer on all ranks"
)


class MissingGradients:
    """Counts in how many steps in a row only other ranks have had a gradient; warns once.

    Ranks may use different layers on purpose, so a parameter that a module of this process has is no reason to warn.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Starts to count.

        Args:
            parameters: returns all parameters of the optimizer; if modules have none of them, nothing is known.
        """
        self._parameters = parameters
        self._steps: dict[str, int] = {}
        self._has_warned = False

    def note_step(self, missed: Mapping[str, torch.Tensor]) -> None:
        """Counts a step.

        Args:
            missed: the parameters, by name, whose gradients only other ranks have had in this step.
        """
        self._steps = {name: self._steps.get(name, 0) + 1 for name in missed}
        long = [name for name, steps in self._steps.items() if steps == _STEPS]
        if long and not self._has_warned:
            owned = set(_ids_in_modules())
            lost = [name for name in long if id(missed[name]) not in owned]
            if lost and any(id(parameter) in owned for parameter in self._parameters()):
                self._has_warned = True
                log.warning(_TEXT, lost[0], len(lost), _STEPS)


def _ids_in_modules() -> Iterator[int]:
    """Yields the ids of the parameters of all modules of this process; takes some milliseconds."""
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            yield from map(id, vars(found).get("_parameters", {}).values())

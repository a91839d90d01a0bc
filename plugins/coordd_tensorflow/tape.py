"""`DistributedGradientTape`: the user's tape, with gradients averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from coordd import api
from coordd.errors import ArgumentError
from coordd.gradients.bucketing import Grouping
from coordd.gradients.settings import Choices
from coordd.ops.arguments import check_op, read_groups
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd_tensorflow.compression import Compression, checked
from coordd_tensorflow.exchange import Exchange, plain, scaled, variable_of

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed(tf.GradientTape):
    """Methods added to the user's tape; the new class is a subclass of this class and the tape's."""

    _coordd: Exchange
    _local: dict[int, Any]
    _scale: int

    def register_local_source(self, source: Any) -> None:
        """Excludes the gradients of a variable from the reduction."""
        self._local[_key(source)] = source

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Computes gradients like `tf.GradientTape.gradient`, and reduces those of variables that are not local.

        With ``scale_local_gradients``, gradients of local variables are divided by the number of ranks, like averages.
        """
        found = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat, variables = tf.nest.flatten(found, expand_composites=False), tf.nest.flatten(sources)
        common = [index for index, variable in enumerate(variables) if _key(variable) not in self._local]
        reduced = self._coordd.reduce([flat[index] for index in common], [variables[index] for index in common])
        if self._local and self._scale != 1:
            flat = [scaled(gradient, self._scale) for gradient in flat]
        for index, gradient in zip(common, reduced, strict=True):
            flat[index] = gradient
        return tf.nest.pack_sequence_as(sources, flat, expand_composites=False)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Computes gradients like `gradient`, and separates those of local sources from the others.

        Args:
            target: as for `tf.GradientTape.gradient`.
            sources: as for `tf.GradientTape.gradient`, in any structure.
            output_gradients: as for `tf.GradientTape.gradient`.
            use_generic_names: ignored.

        Returns:
            two lists of pairs (source, gradient), in the order of the sources: local sources, and the others.
        """
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, self.gradient(target, flat, output_gradients), strict=True))
        own = [pair for pair in pairs if _key(pair[0]) in self._local]
        return own, [pair for pair in pairs if _key(pair[0]) not in self._local]


def _key(source: Any) -> int:
    """Returns a variable's key; equal for a Keras variable and its TensorFlow variable."""
    return id(variable_of(source))


def DistributedGradientTape(  # noqa: N802 - Horovod's name and signature
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a tape average its gradients over the ranks.

    Args:
        gradtape: a tape, before or after it has recorded; its ``gradient`` may be called in a `tf.function` or outside.
        device_dense: ignored.
        device_sparse: ignored.
        compression: of gradients: one of `Compression`.
        sparse_as_dense: converts `tf.IndexedSlices` to dense gradients and reduces these.
        op: `Average`, `AveragePresent` or `Sum`.
        gradient_predivide_factor: splits the averaging: gradients are divided by it before the reduction and multiplied
            by it after.
        num_groups: reduces gradients in this many buckets of nearly equal size instead of the default ones.
        groups: lists of variables whose gradients are reduced together; other gradients use the default buckets.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local sources are divided by the number of ranks.

    Raises:
        ArgumentError: an argument is invalid.
        NotInitializedError: `init` was not called.
    """
    if api.operations().as_horovod:
        num_groups, groups = read_groups(num_groups, groups)
    if isinstance(gradtape, _Distributed):
        text = "this tape is a DistributedGradientTape already: wrap it once"
        raise ArgumentError(text)
    choices = Choices(
        op=check_op(op),
        process_set=process_set,
        predivide=float(gradient_predivide_factor),
        compression=checked(compression),
        sparse_as_dense=sparse_as_dense,
        grouping=Grouping(num_groups, plain(groups), kind=tf.Variable),
    )
    scale = process_set.count(api.size()) if scale_local_gradients else 1
    ours = {"_coordd": Exchange(choices), "_local": {}, "_scale": scale}  # per wrapper, not in the shared `__dict__`
    kind = type(gradtape)
    tape: Any = object.__new__(type(kind.__name__, (_Distributed, kind), ours))
    tape.__dict__ = gradtape.__dict__  # all references to the tape see the same state
    return tape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **details: Any
) -> Any:
    """Makes a tape average all gradients except those of local layers, whose weights differ between ranks.

    Args:
        gradtape: as for `DistributedGradientTape`.
        args: further positional arguments of `DistributedGradientTape`.
        local_layers: a layer, or several.
        details: further keyword arguments of `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(gradtape, *args, **details)
    for variable in _trainable_of(local_layers):
        tape.register_local_source(variable)
    return tape


def _trainable_of(layers: Any) -> Iterable[Any]:
    """Returns the trainable weights of zero or more layers."""
    several = [] if layers is None else layers if isinstance(layers, (list, tuple, set)) else [layers]
    return [variable for layer in several for variable in layer.trainable_weights]

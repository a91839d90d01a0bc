"""`DistributedGradientTape`: the user's tape, whose gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from coordd import api
from coordd.arguments import check_op, read_groups
from coordd.choices import Choices
from coordd.errors import ArgumentError
from coordd.grouping import Grouping
from coordd.messages import ReduceOp
from coordd.process_sets import ProcessSet, global_process_set
from coordd_tensorflow.compression import Compression, checked
from coordd_tensorflow.exchange import Exchange, plain, scaled, variable_of

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed(tf.GradientTape):
    """What is added to the user's tape; its class becomes a subclass of both."""

    _coordd: Exchange
    _local: dict[int, Any]
    _scale: int

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradients of a variable for this rank."""
        self._local[_key(source)] = source

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Computes gradients as `tf.GradientTape.gradient` does, and reduces those of variables that are not local.

        With ``scale_local_gradients`` local ones are divided by the number of ranks, as averages are.
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
        """Computes gradients as `gradient` does, and sorts them by whether they are this rank's own.

        Args:
            target: as for `tf.GradientTape.gradient`.
            sources: as there, in any structure.
            output_gradients: as there.
            use_generic_names: not needed.

        Returns:
            pairs of a source and its gradient, in the order of the sources: those registered as local, and the others.
        """
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, self.gradient(target, flat, output_gradients), strict=True))
        own = [pair for pair in pairs if _key(pair[0]) in self._local]
        return own, [pair for pair in pairs if _key(pair[0]) not in self._local]


def _key(source: Any) -> int:
    """What a variable is known by; a Keras variable and its TensorFlow variable are the same."""
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
        device_dense: not needed.
        device_sparse: not needed.
        compression: what travels instead of the gradients: one of `Compression`.
        sparse_as_dense: turns `tf.IndexedSlices` into dense gradients, which are added up.
        op: `Average`, `AveragePresent` or `Sum`.
        gradient_predivide_factor: splits the averaging: gradients are divided by it before, multiplied after.
        num_groups: so many buckets of nearly equal size, instead of the usual ones.
        groups: lists of variables whose gradients are reduced together; the rest as usual.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local sources are divided by the number of ranks.

    Raises:
        ArgumentError: an argument is none of these.
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
    ours = {"_coordd": Exchange(choices), "_local": {}, "_scale": scale}  # not among what both tapes have in common
    kind = type(gradtape)
    tape: Any = object.__new__(type(kind.__name__, (_Distributed, kind), ours))
    tape.__dict__ = gradtape.__dict__  # it is the same tape, wherever it is used from
    return tape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **details: Any
) -> Any:
    """Makes a tape whose gradients are averaged, but for those of some layers, which every rank has for itself.

    Args:
        gradtape: as for `DistributedGradientTape`, whose other arguments may follow.
        args: those.
        local_layers: a layer, or several.
        details: those by name.
    """
    tape = DistributedGradientTape(gradtape, *args, **details)
    for variable in _trainable_of(local_layers):
        tape.register_local_source(variable)
    return tape


def _trainable_of(layers: Any) -> Iterable[Any]:
    """Lists the trainable weights of no layer, one layer, or several."""
    several = [] if layers is None else layers if isinstance(layers, (list, tuple, set)) else [layers]
    return [variable for layer in several for variable in layer.trainable_weights]

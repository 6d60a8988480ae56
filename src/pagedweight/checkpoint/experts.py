"""Where each routed expert's weights lie in a source, checked complete and of the right shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from pagedweight.checkpoint.names import (
    LOOKS_LIKE_EXPERT,
    NEVER,
    Architecture,
    ExpertTensor,
    ModelFacts,
)
from pagedweight.checkpoint.tensorfile import TensorFile
from pagedweight.core.geometry import LayerShape
from pagedweight.errors import CheckpointError, listing

EXPERT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class ExpertIndex:
    """Tensor names of all routed experts of a source.

    `by_place`: (decoder layer, expert or None when fused, part) to name. `dtype`: safetensors name,
    one for all. `transposed`: fused tensors are stored [E, K, N] instead of [E, N, K].
    """

    moe_layers: tuple[int, ...]
    by_place: Mapping[ExpertTensor, str]
    names: frozenset[str]
    fused: bool
    transposed: bool
    dtype: str

    def name(self, layer_pos: int, expert: int, part: str) -> str:
        """The tensor that holds `part` (gate, up, down or gate_up) of an expert."""
        layer = self.moe_layers[layer_pos]
        place = ExpertTensor(layer, None if self.fused else expert, part)  # type: ignore[arg-type]
        return self.by_place[place]


def index_experts(
    architecture: Architecture, facts: ModelFacts, files: Mapping[str, TensorFile]
) -> ExpertIndex:
    """Find every expert tensor; raises CheckpointError naming layer, expert and tensor."""
    shape, moe_layers = facts.shape, facts.moe_layers
    by_place = _places(architecture, facts.prediction_layers, files)
    fused = _one_layout(architecture, by_place)
    wanted = set(_wanted(shape, moe_layers, fused))
    _complete(wanted, by_place, shape, moe_layers)
    entries = {name: files[name].tensors[name].entry for name in by_place.values()}
    types = Counter(entry.dtype for entry in entries.values())
    if len(types) > 1 or next(iter(types)) not in EXPERT_DTYPES:
        counts = ", ".join(f"{n} of {dtype}" for dtype, n in types.items())
        raise CheckpointError(
            f"expert tensors must all have one type out of {', '.join(EXPERT_DTYPES)}; "
            f"found {counts}"
        )
    shapes = {place: entries[name].shape for place, name in by_place.items()}
    transposed = fused and _stored_transposed(shapes, shape)
    _check_shapes(shapes, by_place, shape, transposed)
    return ExpertIndex(
        moe_layers=moe_layers,
        by_place=by_place,
        names=frozenset(by_place.values()),
        fused=fused,
        transposed=transposed,
        dtype=next(iter(types)),
    )


def _places(
    architecture: Architecture, left_out: Container[int], names: Iterable[str]
) -> dict[ExpertTensor, str]:
    by_place: dict[ExpertTensor, str] = {}
    unknown = []
    for name in names:
        place = architecture.parse(name)
        if place is None:
            if LOOKS_LIKE_EXPERT.search(name) and not NEVER.search(name):
                unknown.append(name)
        elif place.layer in left_out:
            continue
        elif place in by_place:
            raise CheckpointError(f"{by_place[place]} and {name} are the same expert's weights")
        else:
            by_place[place] = name
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors look like experts but {architecture.name} has no such names: "
            f"{listing(unknown)}"
        )
    return by_place


def _one_layout(architecture: Architecture, by_place: Mapping[ExpertTensor, str]) -> bool:
    """True for fused 3-D tensors, False for one tensor an expert; never both, never none."""
    fused = [name for place, name in by_place.items() if place.expert is None]
    single = [name for place, name in by_place.items() if place.expert is not None]
    if fused and single:
        raise CheckpointError(
            f"experts are stored both fused ({listing(fused, 2)}) and one by one "
            f"({listing(single, 2)}); keep one of them"
        )
    if not by_place:
        raise CheckpointError(
            f"no routed expert found: no tensor is named as {architecture.name} names them"
        )
    return bool(fused)


def _wanted(shape: LayerShape, moe_layers: tuple[int, ...], fused: bool) -> Iterable[ExpertTensor]:
    for layer in moe_layers:
        if fused:
            yield ExpertTensor(layer, None, "gate_up")
            yield ExpertTensor(layer, None, "down")
            continue
        for expert in range(shape.experts):
            yield ExpertTensor(layer, expert, "gate")
            yield ExpertTensor(layer, expert, "up")
            yield ExpertTensor(layer, expert, "down")


def _complete(
    wanted: set[ExpertTensor],
    by_place: Mapping[ExpertTensor, str],
    shape: LayerShape,
    moe_layers: tuple[int, ...],
) -> None:
    """What config.json promises must be there, and nothing else."""
    promised = f"config.json says {shape.experts} experts in {len(moe_layers)} layers"
    if missing := sorted(wanted - by_place.keys(), key=_order):
        raise CheckpointError(
            f"{len(missing)} of {len(wanted)} expert tensors are missing: "
            f"{listing(map(_describe, missing))}; {promised}"
        )
    if extra := sorted(by_place[p] for p in by_place.keys() - wanted):
        raise CheckpointError(f"{len(extra)} expert tensors too many: {listing(extra)}; {promised}")


def _order(place: ExpertTensor) -> tuple[int, int, str]:
    return place.layer, -1 if place.expert is None else place.expert, place.part


def _describe(place: ExpertTensor) -> str:
    expert = "" if place.expert is None else f" expert {place.expert}"
    return f"layer {place.layer}{expert} {place.part}"


def _expected(place: ExpertTensor, shape: LayerShape, transposed: bool) -> tuple[int, ...]:
    rows = {"gate_up": shape.gate_up.rows, "down": shape.down.rows}.get(
        place.part, shape.intermediate
    )
    cols = shape.down.cols if place.part == "down" else shape.hidden
    if place.expert is not None:
        return (rows, cols)
    return (shape.experts, cols, rows) if transposed else (shape.experts, rows, cols)


def _stored_transposed(shapes: Mapping[ExpertTensor, tuple[int, ...]], shape: LayerShape) -> bool:
    """Whether all fused tensors fit [E, K, N] and not all fit [E, N, K].

    The two kinds together decide it: gate_up is square only when H = 2I, down only when H = I.
    """

    def fits(transposed: bool) -> bool:
        return all(found == _expected(p, shape, transposed) for p, found in shapes.items())

    return fits(True) and not fits(False)


def _check_shapes(
    shapes: Mapping[ExpertTensor, tuple[int, ...]],
    by_place: Mapping[ExpertTensor, str],
    shape: LayerShape,
    transposed: bool,
) -> None:
    wrong = [
        f"{by_place[place]} is {list(found)} instead of {list(_expected(place, shape, transposed))}"
        for place, found in shapes.items()
        if found != _expected(place, shape, transposed)
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} expert tensors do not have the shape that config.json gives "
            f"(hidden {shape.hidden}, expert width {shape.intermediate}): {listing(wrong, 4)}"
        )

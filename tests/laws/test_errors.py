"""Bad input gets a clear error and changes nothing: the state is the same bit for bit, and the next good step works.

On several ranks every rank must raise, within 30 seconds and without a hang, whatever one of them got wrong. Those
cases run one after another in one real gloo world of 2 and one of 3 (`ranks`); a case that hung would fail all of them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from capturing import said
from helpers import Outcome, differing, gloo
from torch import Tensor

import fzero
from fzero import CaptureError, DisagreementError, DonatedError, FzeroError, SpecError, TreeError
from fzero.runtime.executor import Executor
from fzero.state.state import State

SGD = fzero.optim.sgd(0.001, momentum=0.9)


def params(scale: float = 1.0) -> dict[str, Any]:
    return {"blocks": [{"w": scale * torch.arange(6.0).reshape(3, 2)}, {"w": torch.ones(2)}], "v": torch.ones(3)}


def loss(p: Any, b: Any) -> Tensor:
    return (((b["x"] * p["v"]) @ p["blocks"][0]["w"] * p["blocks"][1]["w"]).sum(1) - b["y"]).pow(2).mean() * b.get(
        "s", 1
    )


def batch(rows: int = 4, rank: int = 0) -> dict[str, Tensor]:
    return {"x": torch.arange(3.0 * rows).reshape(rows, 3) / 10 + rank, "y": torch.ones(rows)}


def spec(**options: Any) -> fzero.Spec:
    return fzero.Spec(**{"loss": loss, "optimizer": SGD, **options})


def whole(state: State) -> dict[str, Tensor]:
    paths, leaves, _ = fzero.tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert all(x.isfinite().all() for x in a.values()), "nothing equals nan"
    return not differing(a, b)


pairs: dict[str, tuple[State, State]] = {}  # by options of a spec: a state that calls fail on, and one that sees none


def pair_of(**options: Any) -> tuple[State, State]:
    """They go on from case to case, since what takes long is to trace their steps; a case that fails ends them."""
    made = pairs.pop(str(options), None) or [fzero.init(params(), spec(**options)) for _ in range(2)]
    return made[0], made[1]


@contextmanager
def changes_nothing(**options: Any) -> Iterator[State]:
    """A state whose block is to fail in it; then the state is untouched and steps as one that saw no error."""
    state, twin = (fzero.step(one, batch()) for one in pair_of(**options))
    before, at, programs = whole(state), state.step, len(state.runtime.programs)
    yield state
    assert equal(whole(state), before)
    assert state.step == at
    assert len(state.runtime.programs) == programs, "nothing is left of what was refused"
    state, twin = fzero.step(state, batch(2)), fzero.step(twin, batch(2))
    assert state.step == at + 1
    assert not equal(whole(state), before)
    assert torch.equal(state.metrics["loss"], twin.metrics["loss"])
    assert equal(whole(state), whole(twin))
    pairs[str(options)] = state, twin


# --- Spec -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zeroo", "Did you mean 'zero'?"),
        ("micro_batches", "Did you mean 'microbatches'?"),
        ("optimiser", "Did you mean 'optimizer'?"),
        ("clipnorm", "Did you mean 'clip_norm'?"),
        ("bucket_byte", "Did you mean 'bucket_bytes'?"),
        ("learning", "Spec has no field 'learning'"),
    ],
)
def test_an_unknown_field_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    said(SpecError, lambda: spec(**{name: 1}), f"Spec has no field {name!r}", hint)


BAD_VALUES: list[tuple[str, Any, str]] = [
    *(("zero", value, "a stage 0, 1, 2 or 3, ") for value in (4, -1, "3", True, 2.0, None, [3], {"**": 5})),
    ("zero", {}, "at least one rule, as in {'**': 3}"),
    ("zero", {1: 3}, "path rules that are text"),
    *(("mesh", value, "axis sizes, as in {'dp': 2}") for value in ({}, 2, ("dp", 2), "dp")),
    *(("mesh", {"dp": value}, "mesh['dp']") for value in (0, -2, 2.0, "2", True)),
    *(("microbatches", value, "a positive int") for value in (0, -1, 2.0, "2", True, None)),
    ("reduce", "eech", "Did you mean 'each'?"),
    ("reduce", "End", "Did you mean 'end'?"),
    ("reduce", 1, "[None, 'each', 'end']"),
    *(("clip_norm", value, "a number > 0") for value in (0, -1.0, float("nan"), "1", True)),
    *(("bucket_bytes", value, "a positive int") for value in (0, -1, 1e6, "32MB", True)),
    *(("prefetch", value, "0 or a positive int") for value in (-1, 1.5, True)),
    *((name, value, "a positive int") for name in ("gather_bytes", "prefetch_bytes") for value in (0, -5, 1.0)),
    *(("overlap", value, "True or False") for value in (1, None, "yes")),
    *(("allow_unused", value, "True or False") for value in (0, None, "no")),
    *(("device", value, "a device's name") for value in ("cudda", 3, "cuda:x")),
    *(("loss", value, "a function (params, batch) -> loss") for value in (3, "mse")),
    *(("optimizer", value, "one of fzero.optim") for value in ("adam", 3e-4, torch.optim.AdamW)),
]


@pytest.mark.parametrize(("name", "value", "needed"), BAD_VALUES, ids=lambda x: str(x)[:24])
def test_a_bad_value_of_a_field_is_refused(name: str, value: Any, needed: str) -> None:
    shown = value["dp"] if name == "mesh" and isinstance(value, dict) and value else value
    shown = 5 if value == {"**": 5} else shown
    said(SpecError, lambda: spec(**{name: value}), f"Spec({name}", repr(shown), "needed", needed)


@pytest.mark.parametrize("value", [3, None, [], [3], "", [""]])
def test_bad_params_rules_are_refused(value: Any) -> None:
    said(
        SpecError, lambda: fzero.Spec(step=lambda s, b: (s, {}), params=value), f"Spec(params={value!r})", "path rules"
    )


def test_an_unknown_mesh_axis_is_refused_with_a_suggestion() -> None:
    said(
        SpecError,
        lambda: spec(mesh={"ddp": 2}),
        "mesh={'ddp': 2}): needed shard= with 'ddp' in a rule",
        "Did you mean 'dp'?",
    )
    said(SpecError, lambda: spec(mesh={"tp": 2}), "mesh={'tp': 2}", "needed shard= with 'tp'")
    assert str(fzero.lower(spec(mesh={"dp": 2, "tp": 1}), params(), batch()).plan.mesh) == "dp=2 tp=1"


def test_loss_and_step_exclude_each_other() -> None:
    step = lambda s, b: (s, {})  # noqa: E731
    said(SpecError, lambda: fzero.Spec(), "Spec needs loss=", "or step=")
    said(SpecError, lambda: fzero.Spec(loss=loss), "Spec needs optimizer=")
    said(SpecError, lambda: fzero.Spec(optimizer=SGD), "Spec needs loss=")
    said(SpecError, lambda: fzero.Spec(step=3), "Spec(step=3)", "(state, batch) -> (state, metrics)")
    for name, value in (("loss", loss), ("optimizer", SGD), ("clip_norm", 1.0)):
        said(
            SpecError, lambda n=name, v=value: fzero.Spec(step=step, **{n: v}), f"leave out {name}=", "leave out step="
        )
    said(SpecError, lambda: spec(params="model/**"), "Spec(params='model/**')", "step=")


# --- init and lower ---------------------------------------------------------------------------------------------------


def test_a_mesh_that_does_not_match_the_world_is_refused() -> None:
    said(SpecError, lambda: fzero.init(params(), spec(mesh={"dp": 2})), "mesh={'dp': 2} needs 2 ranks, there are 1")
    said(SpecError, lambda: fzero.lower(spec(mesh={"dp": 2}), params(), batch(), world_size=4), "there are 4")
    for size in (0, -1, 2.0, "2", True):
        said(SpecError, lambda s=size: fzero.lower(spec(), params(), batch(), world_size=s), f"world_size={size!r}")
    assert fzero.lower(spec(mesh={"dp": 2}), params(), batch()).plan.world_size == 2


def test_zero_rules_that_match_nothing_or_leave_a_leaf_out_are_refused() -> None:
    rules = {"block/**": 3, "**": 1}
    said(
        SpecError,
        lambda: fzero.init(params(), spec(zero=rules)),
        "'block/**' matches no leaf",
        "Did you mean 'blocks/**'?",
    )
    said(
        SpecError,
        lambda: fzero.lower(spec(zero={"nothing": 3, "**": 1}), params(), batch()),
        "'nothing' matches no leaf",
    )
    said(SpecError, lambda: fzero.init(params(), spec(zero={"blocks/**": 3})), "no rule for '", "'**': 1")
    fzero.init(params(), spec(zero={"blocks/**": 3, "**": 1}))


def test_params_rules_that_match_nothing_are_refused() -> None:
    one = fzero.Spec(step=lambda s, b: (s, {}), params="modle/**", zero=1)
    said(SpecError, lambda: fzero.init({"model": params()}, one), "'modle/**' matches no leaf", "Did you mean 'model/")


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        (torch.nn.Linear(2, 2), ("params is a module", "fzero.interop.from_module")),
        ({}, ("params has no leaves",)),
        (None, ("params has no leaves",)),
        ({"a": [None]}, ("params has no leaves",)),
        (lambda key: {}, ("params has no leaves",)),
        (lambda: {"w": 1}, ("makes the first state, and is called with a key", "Write it as `lambda key: ...`")),
        ({"v": "text"}, ("params/v is 'text'", "must be a tensor")),
        ("text", ("params is 'text'",)),
        ({"v": [torch.ones(2), True]}, ("params/v/1 is True",)),
        ({"v": torch.ones(2, dtype=torch.int64)}, ("no leaf of params", "floating")),
        ({"v": torch.ones(2).to_sparse()}, ("params['v']", "torch.sparse_coo", "dense")),
        ({"v": torch.ones(2, device="meta")}, ("meta device", "fzero.lower")),
        ({"v": torch.ones(2), "w": torch.ones(2, device="meta")}, ("several devices", "cpu", "meta")),
        (iter([torch.ones(2)]), ("params is of type list_iterator",)),
    ],
    ids=lambda x: str(x)[:24],
)
def test_params_that_cannot_be_a_state_are_refused(bad: Any, parts: tuple[str, ...]) -> None:
    said(TreeError, lambda: fzero.init(bad, spec()), *parts)


def test_leaves_of_a_step_state_that_no_buffer_holds_are_refused() -> None:
    one = fzero.Spec(step=lambda s, b: (s, {}))
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for value, remedy in ((torch.ones(2).to_sparse(), "as its indices and values"), (quantised, "Convert it first")):
        said(TreeError, lambda v=value: fzero.init({"v": v}, one), "params['v'] is a tensor of", remedy)


def test_leaves_that_would_have_one_name_are_refused() -> None:
    one = fzero.Spec(step=lambda s, b: (s, {}))
    for tree, words, remedy in [
        ({"a/b": 1.0, "a": {"b": 2.0}}, "two leaves are named state['a/b']", "Rename a key"),
        ({"n 1": 1.0, "n_1": 2.0}, "state['n 1'] and state['n_1'] have one name", "rename a key"),
        ({1: torch.ones(2), "1": torch.zeros(2)}, "two leaves are named state['1']", "a number as its text. Rename"),
    ]:
        said(TreeError, lambda tree=tree: fzero.init(tree, one), words, remedy)
    one = fzero.Spec(step=lambda s, b: (s, {1: b["y"].sum(), "1": b["y"].mean()}))
    said(TreeError, lambda: fzero.step(fzero.init(params(), one), batch()), "two leaves are named metrics['1']")


def test_states_are_no_params() -> None:
    state = fzero.init(params(), spec())
    said(TreeError, lambda: fzero.init(state, spec()), "of type State")
    said(TreeError, lambda: fzero.init(state.params, spec()), "of type ShardedTensor")


def test_swapped_and_missing_arguments_are_explained() -> None:
    said(
        SpecError,
        lambda: fzero.init(spec(), params()),
        "fzero.init needed a Spec, got dict: call fzero.init(params, spec)",
    )
    said(SpecError, lambda: fzero.init(params(), fzero.Spec), "needed a Spec, got type")
    said(SpecError, lambda: fzero.lower(params(), spec(), batch()), "fzero.lower needed a Spec, got dict")


def test_keys_of_init_are_checked() -> None:
    def make(key: Tensor) -> Any:
        return {"w": fzero.random.normal(key, 3)}

    for key in (3, torch.Generator(), torch.ones(2)):
        said(TreeError, lambda k=key: fzero.init(make, spec(), key=k), "fzero.init(key=", "fzero.random.key(0)")
    own = fzero.Spec(step=lambda s, b: (s, {}))
    said(TreeError, lambda: fzero.init(params(), own, key=fzero.random.key(0)), "key=", "the state is yours")
    said(CaptureError, lambda: fzero.init(lambda key: {"w": torch.randn(3)}, spec()), "ambient", "test_errors.py:")
    a, b = (whole(fzero.init(make, spec(), key=fzero.random.key(seed))) for seed in (1, 2))
    assert not torch.equal(a["params/w"], b["params/w"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
    said(SpecError, lambda: fzero.init(params(), spec(device="cuda")), "device='cuda'", "no CUDA device")


def test_init_twice_makes_two_states() -> None:
    given = params()
    one, two = fzero.init(given, spec()), fzero.init(given, spec())
    before = whole(two)
    fzero.step(one, batch())
    assert equal(whole(two), before)
    assert torch.equal(given["v"], torch.ones(3)), "params were copied"


# --- the batch --------------------------------------------------------------------------------------------------------


def with_y(value: Any) -> dict[str, Any]:
    return {**batch(), "y": value}


@pytest.mark.parametrize(
    ("bad", "error", "parts"),
    [
        (with_y(torch.ones(4, device="meta")), TreeError, ("batch['y'] is on meta, the state on cpu",)),
        (with_y(torch.ones(4, requires_grad=True)), TreeError, ("batch['y'] requires grad", "detach() it")),
        (with_y(torch.nn.Parameter(torch.ones(4))), TreeError, ("batch['y'] requires grad",)),
        (with_y(torch.ones(4).to_sparse()), TreeError, ("batch['y']", "torch.sparse_coo", "dense")),
        (with_y({1, 2}), TreeError, ("batch['y'] is set: needed a tensor or a hashable value",)),
        (with_y([[1.0, bytearray()]]), TreeError, ("batch['y/0/1'] is bytearray",)),
        (with_y(torch.ones(4).numpy()), TreeError, ("batch['y'] is ndarray: needed a tensor",)),
        (with_y(object()), TreeError, ("batch['y'] is a object", "Pass a dict")),
        ({"x": batch()["x"]}, KeyError, ("y",)),
        ({**batch(), "x": torch.ones(4, 2)}, RuntimeError, ("2", "3")),
        (
            {**batch(), "x": torch.ones(4, 3, dtype=torch.float64)},
            CaptureError,
            ("f64[4, 3] and f32[3, 2]", "test_errors.py:"),
        ),
        (None, TypeError, ("subscriptable",)),
        ([batch()["x"]], TypeError, ("indices",)),
    ],
    ids=lambda x: str(x)[:30].replace("\n", " "),
)
@pytest.mark.sampled(6)
def test_a_bad_batch_is_refused_and_changes_nothing(bad: Any, error: type[Exception], parts: tuple[str, ...]) -> None:
    with changes_nothing() as state:
        said(error, lambda: fzero.step(state, bad), *parts)


def test_a_dtype_that_no_buffer_holds_is_refused() -> None:
    odd = torch.empty(4, dtype=torch.bits16)
    with changes_nothing() as state:
        said(TreeError, lambda: fzero.step(state, with_y(odd)), "batch['y']", "torch.bits16", "Convert it first")
    said(TreeError, lambda: fzero.init({"v": odd}, spec()), "params['v']", "torch.bits16", "Convert it first")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused_with_the_padded_form() -> None:
    rows = [torch.ones(2), torch.ones(3)]
    for ragged in (torch.nested.nested_tensor(rows), torch.nested.nested_tensor(rows, layout=torch.jagged)):
        with changes_nothing() as state:
            said(TreeError, lambda x=ragged: fzero.step(state, with_y(x)), "batch['y'] is a nested tensor", "padded")
        said(TreeError, lambda x=ragged: fzero.init({"v": x}, spec()), "params['v'] is a nested tensor", "padded")


def test_a_leaf_of_the_state_is_no_batch() -> None:
    with changes_nothing() as state:
        said(TreeError, lambda: fzero.step(state, {**batch(), "y": state.params["v"]}), "batch['y'] is ShardedTensor")


def test_a_batch_that_microbatches_do_not_divide_is_refused() -> None:
    with changes_nothing(microbatches=2) as state:
        parts = ("batch['x'] is f32[3, 3]: dim 0 must be divisible by microbatches=2",)
        said(CaptureError, lambda: fzero.step(state, batch(3)), *parts)


def test_a_program_that_the_verifier_refuses_stays_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Any) -> None:
        raise fzero.VerifyError("op 3 of pass free: broken")

    with changes_nothing(zero=1) as state, monkeypatch.context() as patch:  # of no other test: no program for two rows
        patch.setattr("fzero.compile.checked.verify", refuse)
        for _ in range(2):
            said(fzero.VerifyError, lambda: fzero.step(state, batch(2)), "op 3")


def test_step_needs_a_state() -> None:
    state = fzero.init(params(), spec())
    for value in (params(), state.tree, state.params, None):
        said(TreeError, lambda v=value: fzero.step(v, batch()), "fzero.step needs the State", type(value).__name__)


def test_inference_mode_around_a_step_changes_nothing() -> None:
    outside = fzero.step(fzero.init(params(), spec()), batch())
    with torch.inference_mode():
        inside = fzero.init(params(), spec())
        inside = fzero.step(inside, {name: x.clone() for name, x in batch().items()})
        assert equal(whole(inside), whole(outside))
    inside, outside = fzero.step(inside, batch()), fzero.step(outside, batch())
    assert equal(whole(inside), whole(outside))


# --- use of a donated state -------------------------------------------------------------------------------------------


def test_a_donated_state_is_refused_everywhere_and_the_leaf_is_named() -> None:
    old = fzero.init(params(), spec())
    leaf = old.params["blocks"][0]["w"]
    new = fzero.step(old, batch())
    before = whole(new)
    parts = ("state['params/blocks/0/w']", "was donated to fzero.step at step 1", "state = fzero.step(state, batch)")
    said(DonatedError, lambda: leaf.local, *parts)
    said(DonatedError, lambda: leaf.full(), *parts)
    said(DonatedError, lambda: leaf.to_dtensor(), *parts)
    said(DonatedError, lambda: fzero.unshard({"mine": leaf}), *parts)
    said(DonatedError, lambda: fzero.unshard(old.params), "state['params/", *parts[1:])
    said(DonatedError, lambda: fzero.step(old, batch()), "this state (state['", "more leaves", *parts[1:])
    assert (tuple(leaf.shape), leaf.dtype, old.step) == ((3, 2), torch.float32, 0), "what it is can still be asked"
    assert equal(whole(new), before)
    fzero.step(new, batch())
    said(DonatedError, lambda: new.params["v"].full(), "state['params/v']", "at step 2")


def test_what_is_put_into_a_states_tree_is_not_ignored(tmp_path: Path) -> None:
    state = fzero.init(params(), spec())
    own, parts = state.params["v"], ("state['params/v'] was put into", ".local.mul_(0.5)", ".copy_(x)")
    state.params["v"] = torch.zeros(own.shape)
    said(TreeError, lambda: fzero.step(state, batch()), *parts)
    said(TreeError, lambda: fzero.evaluate(state, batch(), loss), *parts)
    said(TreeError, lambda: fzero.save(state, tmp_path), *parts)
    del state.params["v"]
    said(TreeError, lambda: fzero.step(state, batch()), "state['params/v'] was removed from")
    state.params["v"] = fzero.init(params(), spec()).params["v"]  # an equal leaf, of other memory
    said(TreeError, lambda: fzero.step(state, batch()), *parts)
    state.params["v"] = own
    own.local.mul_(0.5)
    half = own.full()
    assert torch.equal(fzero.evaluate(state, batch(), lambda p, b: p["v"] * 1), half)
    fzero.step(state, batch())


def test_unshard_takes_leaves_of_one_state() -> None:
    one, two = fzero.init(params(), spec()), fzero.init(params(), spec())
    said(FzeroError, lambda: fzero.unshard(one), "state.tree or state.params, not a State")
    said(FzeroError, lambda: fzero.unshard([one.params, two.params]), "2 different states: call it once for each")
    assert fzero.unshard({"a": 3, "b": torch.ones(2)})["a"] == 3


def test_what_a_state_does_not_have() -> None:
    state = fzero.init({"p": params()}, fzero.Spec(step=lambda s, b: (s, {})))
    said(AttributeError, lambda: state.params, "this state has no 'params'", "state.tree")
    said(FzeroError, lambda: state.tree["p"]["v"].to_dtensor(), "use full()")


# --- failures inside a step -------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, kind: str, *, before: bool, error: BaseException | None = None) -> None:
    """The first op of a kind raises, before it does its work or after."""
    real = Executor.issue

    def fail() -> None:
        raise error or MemoryError("no memory left")

    def broken(self: Executor, watch: Any = None) -> None:
        at = next(i for i, op in enumerate(self.program.ops) if op.kind == kind)
        calls = self.calls
        self.calls = [*calls[:at], [fail] if before else [*calls[at], fail], *calls[at + 1 :]]
        try:
            real(self, watch)
        finally:
            self.calls = calls

    monkeypatch.setattr(Executor, "issue", broken)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_failure_before_the_first_write_leaves_the_state_usable(monkeypatch: pytest.MonkeyPatch, zero: int) -> None:
    with changes_nothing(zero=zero) as state, monkeypatch.context() as patch:
        failing(patch, "run", before=True)
        said(MemoryError, lambda: fzero.step(state, batch()), "no memory left")


@pytest.mark.parametrize("zero", [0, 3])
def test_a_failure_after_the_first_write_marks_the_state_unusable(monkeypatch: pytest.MonkeyPatch, zero: int) -> None:
    state = fzero.step(fzero.init(params(), spec(zero=zero)), batch())
    other = fzero.init(params(), spec(zero=zero))
    with monkeypatch.context() as patch:
        failing(patch, "update", before=False)
        said(MemoryError, lambda: fzero.step(state, batch()), "no memory left")
    parts = (
        "is unusable: step 2 failed after it began to write (MemoryError: no memory left)",
        "Start again from fzero.init or the last checkpoint",
    )
    said(DonatedError, lambda: fzero.step(state, batch()), *parts)
    said(DonatedError, lambda: state.params["v"].local, "state['params/v']", *parts)
    said(DonatedError, lambda: state.params["v"].full(), "state['params/v']", *parts)
    said(DonatedError, lambda: fzero.unshard(state.opt_state), "state['opt_state/", *parts)
    fzero.step(other, batch())


def test_an_interrupt_after_the_first_write_marks_the_state_too(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fzero.init(params(), spec())
    with monkeypatch.context() as patch:
        failing(patch, "update", before=True, error=KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            fzero.step(state, batch())
    said(DonatedError, lambda: fzero.step(state, batch()), "is unusable", "KeyboardInterrupt")


# --- several ranks ----------------------------------------------------------------------------------------------------


class Try(NamedTuple):
    """What a call did on one rank."""

    error: str
    message: str
    seconds: float


class Case(NamedTuple):
    """What a case left on one rank: the wrong call, whether the state was untouched and stepped well after it, and the
    step that the state was at."""

    tried: Try
    untouched: bool = True
    steps_on: bool = True
    step: int = 0


def attempt(fn: Callable[[], Any]) -> Try:
    start = time.monotonic()
    try:
        fn()
        return Try("", "", time.monotonic() - start)
    except Exception as error:
        return Try(type(error).__name__, str(error), time.monotonic() - start)


def fragile_loss(p: Any, b: Any) -> Tensor:
    if len(b["x"]) == 5 and dist.get_rank() == 1:
        raise ValueError("only here")
    return loss(p, b)


def scaled_loss(factor: float) -> Callable[[Any, Any], Tensor]:
    return lambda p, b: loss(p, b) * factor


def adding_step(mask: Tensor) -> Callable[[Any, Any], Any]:
    def step(s: Any, b: Any) -> Any:
        value, grads = fzero.value_and_grad(lambda p, b: loss(p, b) * (1 + 0 * mask.sum()))(s["params"], b)
        return {"params": fzero.tree.map(lambda p, g: p - g + mask.sum(), s["params"], grads)}, {"loss": value}

    return step


def masked_loss(mask: Tensor) -> Callable[[Any, Any], Tensor]:
    return lambda p, b: loss(p, {**b, "x": b["x"] * mask})


DTYPES = (torch.int64, torch.int32, torch.bool)
Wrong = Callable[[State, int], Any]
INITS: dict[str, Callable[[int], Any]] = {
    "specs: zero": lambda r: fzero.init(params(), spec(zero=3 if r else 1)),
    "specs: microbatches": lambda r: fzero.init(params(), spec(microbatches=1 + r)),
    "specs: bucket_bytes": lambda r: fzero.init(params(), spec(bucket_bytes=16 if r else 1 << 20)),
    "specs: form": lambda r: fzero.init(params(), spec() if r else spec(optimizer=fzero.optim.adam(0.1))),
    "mesh": lambda r: fzero.init(params(), spec(mesh={"dp": 7})),
    "params: shapes": lambda r: fzero.init({"v": torch.ones(3 + r)}, spec()),
    "params: paths": lambda r: fzero.init({f"v{r}": torch.ones(3)}, spec()),
    "params: dtypes": lambda r: fzero.init({"v": torch.ones(3, dtype=torch.float64 if r else torch.float32)}, spec()),
    "params: values": lambda r: fzero.init(params(scale=1.0 + r), spec()),
    "params: keys": lambda r: fzero.init(lambda k: {"w": fzero.random.normal(k, 9)}, spec(), key=fzero.random.key(r)),
    "params: one is bad": lambda r: fzero.init({"v": "text"} if r == 1 else params(), spec()),
    "params: one raises": lambda r: fzero.init((lambda k: 1 // (r - 1)) if r == 1 else params(), spec()),
}
STEPS: dict[str, tuple[dict[str, Any], Wrong]] = {
    "batch: shapes": ({}, lambda s, r: fzero.step(s, batch(4 + r))),
    "batch: dtypes": ({}, lambda s, r: fzero.step(s, {**batch(), "n": torch.ones(2).to(DTYPES[r])})),
    "batch: structure": ({}, lambda s, r: fzero.step(s, {**batch(), **({"n": torch.ones(2)} if r else {})})),
    "batch: static values": ({}, lambda s, r: fzero.step(s, {**batch(), "s": 1 + r})),
    "batch: one on meta": ({}, lambda s, r: fzero.step(s, with_y(torch.ones(4, device=["cpu", "meta", "cpu"][r])))),
    "batch: one unhashable": ({}, lambda s, r: fzero.step(s, {**batch(), "n": {1} if r == 1 else 1})),
    "batch: one does not divide": ({"microbatches": 2}, lambda s, r: fzero.step(s, batch(3 if r == 1 else 4))),
    "one retraces": ({}, lambda s, r: fzero.step(s, batch(6 if r == 0 else 4))),
    "the last retraces": ({}, lambda s, r: fzero.step(s, batch(6 if r == dist.get_world_size() - 1 else 4))),
    "full on one rank": ({}, lambda s, r: s.params["v"].full() if r == 0 else fzero.step(s, batch())),
    "unshard of other leaves": ({}, lambda s, r: fzero.unshard(s.params if r else s.opt_state)),
    "no state on one rank": ({}, lambda s, r: fzero.init({}, spec()) if r == 1 else fzero.step(s, batch())),
}  # fmt: skip


def own_part(state: State) -> list[Tensor]:
    return [tensor.clone() for tensor in state.runtime.memory.values()]


def guarded(wrong: Callable[[State], Any], **options: Any) -> Case:
    """Does what is wrong with a state that has stepped, and steps once more beside a twin that did nothing wrong."""
    rank = dist.get_rank()
    state, twin = (fzero.step(one, batch(rank=rank)) for one in pair_of(**options))
    before, at = own_part(state), state.step
    tried = attempt(lambda: wrong(state))
    if state.life.ended:
        return Case(tried, untouched=False)
    untouched = all(torch.equal(a, b) for a, b in zip(own_part(state), before, strict=True))
    state, twin = fzero.step(state, batch(rank=rank)), fzero.step(twin, batch(rank=rank))
    steps_on = equal(whole(state), whole(twin)) and state.step == at + 1
    if steps_on:
        pairs[str(options)] = state, twin
    return Case(tried, untouched, steps_on, at)


def failing_everywhere(state: State) -> State:
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, "run", before=True)
        return fzero.step(state, batch())


def cases(names: Sequence[str]) -> dict[str, Case]:
    """These cases on this rank."""
    torch.manual_seed(0)
    fzero.init(params(), spec())
    rank = dist.get_rank()
    found = {name: Case(attempt(lambda make=make: make(rank))) for name, make in INITS.items() if name in names}
    for name, (options, wrong) in STEPS.items():
        if name in names:
            found[name] = guarded(lambda s, wrong=wrong: wrong(s, rank), **options)

    found["loss raises on one rank"] = guarded(lambda s: fzero.step(s, batch(5)), loss=fragile_loss)
    old = fzero.init(params(), spec())
    new = fzero.step(old, batch(rank=rank))
    found["donated on one rank"] = Case(attempt(lambda: fzero.step(old if rank == 1 else new, batch())))
    found["donated full on one rank"] = Case(attempt(lambda: (old if rank == 1 else new).params["v"].full()))
    new = fzero.step(new, batch(rank=rank))
    assert new.step == 2
    state = fzero.init(params(), spec(loss=scaled_loss(1.0 + rank)))
    found["losses differ"] = Case(attempt(lambda: fzero.step(state, batch())))
    state = fzero.init(params(), spec(optimizer=fzero.optim.adamw(1e-3, weight_decay=0.5 + 0.25 * rank)))
    found["optimizers differ"] = Case(attempt(lambda: fzero.step(state, batch())))
    mask = torch.full((3,), 1.0 + rank)
    state = fzero.init({"params": params()}, fzero.Spec(step=adding_step(mask)))
    found["constants of the update differ"] = Case(attempt(lambda: fzero.step(state, batch())))
    state = fzero.init(params(), spec(loss=masked_loss(mask)))
    found["constants of the loss differ"] = Case(attempt(lambda: fzero.step(state, batch())))
    found["all fail before the first write"] = guarded(failing_everywhere)
    found["another state"] = guarded(lambda s: fzero.step(fzero.init(params(2.0), spec()), batch(rank=rank)))
    return found


OWN = {  # what the rank that is wrong raises itself; the others report it
    "mesh": (SpecError, None, "needs 7 ranks, there are"),
    "params: one is bad": (TreeError, 1, "params/v is 'text'"),
    "params: one raises": (ZeroDivisionError, 1, "division"),
    "batch: one on meta": (TreeError, 1, "batch['y'] is on meta"),
    "batch: one unhashable": (TreeError, 1, "batch['n'] is set"),
    "batch: one does not divide": (CaptureError, 1, "divisible by microbatches=2"),
    "no state on one rank": (TreeError, 1, "params has no leaves"),
    "loss raises on one rank": (ValueError, 1, "only here"),
    "all fail before the first write": (MemoryError, None, "no memory left"),
    "donated on one rank": (DonatedError, 1, "was donated to fzero.step at step 1"),
    "donated full on one rank": (DonatedError, 1, "state['params/v'] was donated"),
}
SHOWN = {  # what the message says of the input that differs
    "params: dtypes": ("state['params/v'] is f32[3] on rank 0, f64[3] on rank 1", "the same params"),
    "params: keys": ("the digest of state['key'] is ", "the values of params differ"),
    "params: paths": ("state['params/v0'] is f32[3] on rank 0, and rank 1 has none", "the same params"),
    "params: shapes": ("state['params/v'] is f32[3] on rank 0, f32[4] on rank 1", "the same params"),
    "params: values": ("the digest of state['params/blocks/0/w'] is ", "the values of params differ"),
    "specs: bucket_bytes": ("Spec(bucket_bytes=) is 1048576 on rank 0, 16 on rank 1", "the same spec"),
    "specs: form": ("state['opt_state/mu/v'] is f32[3] on rank 0, and rank 1 has none", "the same spec"),
    "specs: microbatches": ("Spec(microbatches=) is 1 on rank 0, 2 on rank 1", "the same spec"),
    "specs: zero": ("Spec(zero=) is 1 on rank 0, 3 on rank 1", "the same spec"),
    "batch: structure": ("batch['n'] is f32[2] on rank 1, and rank 0 has none", "on all ranks"),
    "batch: shapes": ("batch['x'] is f32[4, 3] on rank 0, f32[5, 3] on rank 1", "Pad to a multiple"),
    "batch: dtypes": ("batch['n'] is i64[2] on rank 0, i32[2] on rank 1", "on all ranks"),
    "batch: static values": ("batch['s'] is int 1 on rank 0, int 2 on rank 1", "on all ranks"),
    "one retraces": ("batch['x'] is f32[6, 3] on rank 0, f32[4, 3] on rank 1", "Pad to a multiple"),
    "the last retraces": ("batch['x'] is f32[4, 3] on rank 0, f32[6, 3] on rank", "Pad to a multiple"),
    "losses differ": ("factor is 1.0 on rank 0, 2.0 on rank 1", "functions that read the same values"),
    "optimizers differ": ("is 0.9, 0.999, 1e-08, 0.5 on rank 0, 0.9, 0.999, 1e-08, 0.75 on rank 1", "the same numbers"),
}
FINE = ("constants of the loss differ", "another state")
UNLIKE = "full on one rank"
NAMES = [
    *INITS, *STEPS, "loss raises on one rank", "donated on one rank", "donated full on one rank", "losses differ",
    "optimizers differ", "constants of the update differ", "all fail before the first write", *FINE,
]  # fmt: skip


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.acceptance)])
def ranks(request: pytest.FixtureRequest, chosen: Callable[[str, str], list[str]]) -> list[Outcome]:
    names = dict.fromkeys([*chosen("test_every_rank_raises_and_goes_on", "name"), UNLIKE])
    return gloo(request.param, cases, list(names), timeout=600)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_every_rank_raises_and_goes_on(ranks: list[Outcome], name: str) -> None:
    for rank, outcome in enumerate(ranks):
        assert outcome.error is None, f"rank {rank} did not survive the cases: {outcome.error}"
        tried, untouched, steps_on, _ = outcome.value[name]
        assert tried.seconds < 300, "a hang"
        assert untouched, f"rank {rank} changed its state: {tried}"
        assert steps_on, f"rank {rank} steps on differently"
        if name in FINE:
            assert tried.error == "", tried.message
        elif name in OWN and OWN[name][1] in (None, rank):
            assert tried.error == OWN[name][0].__name__, tried
            assert OWN[name][2] in tried.message
        else:
            assert tried.error == DisagreementError.__name__, tried
            if name in OWN:
                assert "rank 1 failed before" in tried.message
                assert f"{OWN[name][0].__name__}: " in tried.message
                assert OWN[name][2] in tried.message
            elif name in SHOWN:
                assert all(part in tried.message for part in SHOWN[name]), tried.message
            else:
                assert all(f"rank {r}: " in tried.message for r in range(len(ranks))), tried.message


def test_calls_that_do_not_match_are_both_named(ranks: list[Outcome]) -> None:
    for outcome in ranks:
        case = outcome.value[UNLIKE]
        assert "rank 0: the whole of 'params/v'" in case.tried.message
        assert f"rank 1: step {case.step + 1}" in case.tried.message

"""The tables of keys: every default is accepted, every verdict is what happens, and DeepSpeed itself has these keys."""

from __future__ import annotations

import copy
import importlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.errors import ConfigError
from fzero.interop import accelerate_config, ds_config
from fzero.interop.config.accelerate_keys import ACCELERATE
from fzero.interop.config.config_keys import FLAG, Key, Verdict, blocks, is_off, leaves
from fzero.interop.config.deepspeed_keys import ALIASES, DEEPSPEED, PYDANTIC
from fzero.interop.config.deepspeed_optimizers import OPTIMIZERS, SCHEDULES
from fzero.interop.config.ledger import nearest
from fzero.interop.config.report import markdown

BLOCKS = blocks(tuple(DEEPSPEED))
PARAMS = {"optimizer.params": OPTIMIZERS, "scheduler.params": SCHEDULES}
ROWS = {"train_micro_batch_size_per_gpu": 2}


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """The document with these values at these paths."""
    document: dict[str, Any] = {}
    for path, value in pairs:
        *above, name = path.split(".")
        inner = document
        for part in above:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return document


def read(*pairs: tuple[str, Any]) -> Any:
    return ds_config(nested(*pairs), world_size=8)


def outcome(found: Any) -> tuple[Any, ...]:
    """All that a document decides, but for the report."""
    beside = ("micro_batch", "global_batch", "every", "trackers", "export_dtype", "profile", "dump", "log_level")
    return (found.python(), *(str(getattr(found, name)) for name in beside))


BASE = outcome(read(*ROWS.items()))


@pytest.mark.parametrize("path", DEEPSPEED)
def test_every_default_is_accepted(path: str) -> None:
    key = DEEPSPEED[path]
    pairs = {**ROWS, path: key.default}
    block, _, name = path.rpartition(".")
    if block in PARAMS and key.verdict.reads:  # a parameter belongs to a type, and its default is the type's
        kind, row = next((kind, row) for kind, row in PARAMS[block].items() if name in row.names)
        near = {**ROWS, "optimizer.type": "SGD", f"{block.split('.')[0]}.type": kind}
        near |= {f"{block}.{needed}": 9 for needed in row.needed if needed != name}
        if name in row.needed:
            return
        assert outcome(read(*{**near, path: key.default}.items())) == outcome(read(*near.items()))
        return
    if path == "train_micro_batch_size_per_gpu":
        pairs = {"train_batch_size": 16, path: None}
    found = read(*pairs.items())
    if path != "train_micro_batch_size_per_gpu":
        assert outcome(found)[1:] == BASE[1:]
    assert path in {line.path for line in found.lines}, "no key is lost"


NEAR: dict[str, list[tuple[str, Any]]] = {  # what makes a key speak, for those that are asleep by themselves
    "fp16": [("fp16.enabled", True)],
    "bf16": [("bf16.enabled", True)],
    "tensorboard": [("tensorboard.enabled", True)],
    "wandb": [("wandb.enabled", True)],
    "csv_monitor": [("csv_monitor.enabled", True)],
    "comet": [("comet.enabled", True)],
    "hybrid_engine": [("hybrid_engine.enabled", True)],
    "torch_autocast": [("torch_autocast.enabled", True)],
    "zero_optimization": [("zero_optimization.stage", 3)],
}
SPECIAL: dict[str, list[tuple[str, Any]]] = {
    "zero_optimization": [],
    "zero_optimization.compute_grad_norm": [("gradient_clipping", 0)],
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": [("bf16.enabled", True)],
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": [("bf16.enabled", True)],
    "scheduler.type": [("optimizer.type", "Adam")],
    "zero_optimization.zero_quantized_weights": [("zero_optimization.stage", 3)],
    "zero_optimization.zero_quantized_gradients": [("zero_optimization.stage", 3)],
}
VALUES: dict[str, Any] = {
    "communication_data_type": "bf16", "optimizer.type": "SGD", "scheduler.type": "WarmupLR", "log_level": "debug",
    "zero_optimization.overlap_comm": False, "zero_optimization.zero_hpz_partition_size": 4,
    "zero_optimization.mics_shard_size": 4, "zero_optimization.compute_grad_norm": True, "pipeline.stages": 2,
    "tensor_parallel.autotp_size": 2, "gradient_allreduce_op": "sum", "fp16.loss_scale": 128,
    "zero_optimization.stage": 2, "data_types.param_dtype": "bf16", "data_types.grad_accum_dtype": "bf16",
    "optimizer.params.ns_method": "standard",
    "tensor_parallel.vocab_parallel_ce_backend": "liger", "seq_parallel_communication_data_type": "fp16",
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "torch_autocast.dtype": "float16",
}  # fmt: skip
# honoured keys whose other values are refused, with a reason
REFUSABLE = {"data_types.param_dtype", "data_types.grad_accum_dtype"}
QUIET = {  # honoured keys that decide nothing by themselves
    *(path for path in DEEPSPEED if path.endswith(".nvme_path")),
}


def other(path: str, key: Key) -> Any:
    """A value of the key's kind that is not its default."""
    if path in VALUES:
        return VALUES[path]
    if path.endswith(".device"):
        return "cpu"
    for value in (not key.default if key.kind is FLAG else None, 7, 0.5, "x", ["x"], {"x": 1}, [0.5, 0.5]):
        if value is not None and value != key.default and key.kind.fits(value):
            return value
    raise AssertionError(path)


@pytest.mark.parametrize("path", [p for p in DEEPSPEED if not p.startswith(("optimizer.params.", "scheduler.params."))])
def test_every_verdict_is_what_happens(path: str) -> None:
    key = DEEPSPEED[path]
    near = SPECIAL.get(path, NEAR.get(path.split(".")[0], []))
    near = [pair for pair in near if pair[0] != path and not pair[0].startswith(f"{path}.")]
    rows = [] if path == "train_batch_size" else list(ROWS.items())
    asleep = all(pair[0] in ("comet.enabled", "hybrid_engine.enabled") for pair in near)
    before = None if near and asleep else outcome(read(*(rows or ROWS.items()), *near))
    pairs = {**dict(rows), **dict(near), path: other(path, key)}
    if key.verdict.off_only or path in REFUSABLE:
        with pytest.raises(ConfigError) as error:
            read(*pairs.items())
        said = [text for at, text in error.value.refusals if at == path]
        assert len(said) == 1, error.value
        assert said[0].startswith(f"{path} = "), error.value
        assert key.verdict.reads or key.says in said[0]
        return
    found = read(*pairs.items())
    line = next(line for line in found.lines if line.path == path)
    if key.verdict.reads and path not in QUIET:
        assert outcome(found) != before, f"{path} changes nothing"
    else:
        assert outcome(found) == before, f"{path} is a {key.verdict.value}, but changes something"
        assert line.became.startswith("nothing")


def test_every_row_says_what_it_needs() -> None:
    for path, key in DEEPSPEED.items():
        assert (key.path, bool(key.says)) == (path, True)
        assert key.default is None or key.kind.fits(key.default) or is_off(key.default, key.default), path
        assert key.fix or not key.verdict.off_only, f"{path} is refused without a fix"
        assert not key.auto or key.verdict in (Verdict.HONOURED, Verdict.HINT), path
    assert set(ALIASES.values()) <= {*DEEPSPEED, *BLOCKS}


def test_the_page_has_both_tables() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
    for table in (DEEPSPEED, ACCELERATE):
        assert markdown(table) in page, "python -m fzero.interop.config prints them"


AUTO_OF_TRANSFORMERS = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "fp16.enabled",
    "bf16.enabled",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
]


def test_auto_may_stand_where_transformers_fills_it() -> None:
    assert sorted(path for path, key in DEEPSPEED.items() if key.auto) == sorted(AUTO_OF_TRANSFORMERS)


# --- DeepSpeed's own models of its configuration


MODELS = {
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "zero_optimization.offload_param": "runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.offload_optimizer": "runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.zenflow": "runtime.zenflow.zenflow_config:ZenFlowConfig",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "wandb": "monitor.config:WandbConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "comet": "monitor.config:CometConfig",
    "compile": "compile.config:CompileConfig",
    "hybrid_engine": "runtime.config:HybridEngineConfig",
    "tensor_parallel": "runtime.tensor_parallel.config:TPTrainingConfig",
    "tensor_parallel.tp": "runtime.tensor_parallel.config:TPConfig",
}
OURS = {  # not fields of these models: removed by DeepSpeed, or read from the document elsewhere
    "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.zeropp_loco_param", "fp16.opt_level", "compile.disable", "compile.backend", "compile.kwargs",
}  # fmt: skip
OTHERWISE = {"tensor_parallel.dtype", "zero_optimization.leaf_module"}  # a default that no file can say


@pytest.mark.acceptance
def test_deepspeeds_models_have_these_keys_and_defaults() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    for block, place in MODELS.items():
        module, name = place.split(":")
        model = getattr(importlib.import_module(f"deepspeed.{module}"), name)
        theirs = {f"{block}.{field.alias or name}": field for name, field in model.model_fields.items()}
        ours = {path for path in DEEPSPEED if path.rpartition(".")[0] == block} - OURS
        assert {path for path in theirs if path not in BLOCKS} == ours, block
        for path in ours - OTHERWISE:
            default = theirs[path].get_default(call_default_factory=True)
            assert getattr(default, "value", default) == DEEPSPEED[path].default, path


# --- documents that nobody wrote


JUNK = st.none() | st.booleans() | st.integers(-9, 10**12) | st.floats() | st.sampled_from(
    ["auto", "cpu", "8", "true", "none", "fp16", "Adam", "WarmupLR", "", [], {}, [1], {"a": 1},
     {"enabled": False}, {"enabled": True}]
)  # fmt: skip
SANE = {
    path: st.just(key.default) | st.sampled_from([0, 1, 2, 0.5, True, False, "auto"]) for path, key in DEEPSPEED.items()
}
SANE |= {"optimizer.type": st.sampled_from(["Adam", "SGD", "Muon", "Lion"]), "scheduler.type": st.just("WarmupLR")}
PATHS = st.sampled_from(
    [*DEEPSPEED, *ALIASES, *BLOCKS, "junk", "zero_optimization.junk", "optimizer.params.junk", "fp16.x"]
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    pairs = []
    for path in draw(st.lists(PATHS, max_size=6, unique=True)):
        pairs.append((path, draw(SANE.get(path, JUNK) if draw(st.integers(0, 3)) else JUNK)))
    return built(pairs)


def built(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The document of these values; a block takes the place of a value where both are drawn."""
    document: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
    for path, value in pairs:
        *above, name = path.split(".")
        inner = document
        for part in above:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[name] = copy.deepcopy(value)  # a drawn block is filled further on
    return document


def without(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The document without what lies at a path, under any of its names."""
    names = {path, *(a for a, known in ALIASES.items() if known == path)}
    names |= {a + path[len(known) :] for a, known in ALIASES.items() if path.startswith(f"{known}.")}

    def kept(inner: dict[str, Any], at: str) -> dict[str, Any]:
        return {
            name: kept(value, f"{at}{name}.") if isinstance(value, dict) else value
            for name, value in inner.items()
            if f"{at}{name}" not in names
        }

    return kept(document, "")


UNSAID = ("train_micro_batch_size_per_gpu", "train_batch_size", "optimizer.params", "")  # refused without being said


def refusals(document: dict[str, Any]) -> tuple[Any, ConfigError | None]:
    try:
        return ds_config(document, world_size=4), None
    except ConfigError as error:
        return None, error


def check_document(document: dict[str, Any]) -> None:
    """No crash, and no key lost: what is refused is named, and when it is gone each key left has its line."""
    for _ in range(20):
        found, error = refusals(document)
        if error is None:
            break
        assert all(text.startswith(path) and text in str(error) for path, text in error.refusals)
        paths = [path for path, _ in error.refusals if path not in UNSAID]
        if not paths:
            assert error.refusals
            return
        for path in paths:
            document = without(document, path)
    known = {line.path for line in found.lines}
    for path, _ in leaves(document, BLOCKS | {other for other, known in ALIASES.items() if known in BLOCKS}):
        other = next((o for o in ALIASES if path == o or path.startswith(f"{o}.")), None)
        canonical = path if other is None else ALIASES[other] + path[len(other) :]
        assert canonical in known or canonical in BLOCKS, f"{path} is lost"


@given(documents())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_documents_that_nobody_wrote(document: dict[str, Any]) -> None:
    check_document(document)


WORDS = ["auto", "cpu", "8", "none", "fp16", "Adam", "WarmupLR", "", "x"]
THINGS = [
    None,
    True,
    False,
    -3,
    0,
    1,
    2,
    7,
    10**12,
    0.5,
    2e8,
    float("nan"),
    *WORDS,
    [],
    {},
    [1],
    {"a": 1},
    {"enabled": True},
]


@pytest.mark.acceptance
def test_a_hundred_thousand_documents() -> None:
    """As above, drawn without shrinking, which takes less time."""
    draw = random.Random(1)
    paths = [*DEEPSPEED, *ALIASES, *BLOCKS, "junk", "zero_optimization.junk", "optimizer.params.junk", "fp16.x"]
    for _ in range(100_000):
        pairs = []
        for path in draw.sample(paths, draw.randrange(7)):
            sane = path in DEEPSPEED and draw.random() < 0.5
            pairs.append((path, DEEPSPEED[path].default if sane else draw.choice(THINGS)))
        check_document(built(pairs))


# --- slips of the finger


LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789"


def slips(name: str, draw: random.Random) -> list[str]:
    """A letter left out, put in, changed, and swapped with the next."""
    at = draw.randrange(len(name))
    letter = draw.choice(LETTERS)
    swapped = name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :]
    return [name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :], swapped]


def suggested(rounds: int) -> tuple[int, int]:
    """(slips with the right suggestion, slips) over all keys and blocks."""
    draw, right, number = random.Random(7), 0, 0
    for path in [*DEEPSPEED, *BLOCKS]:
        parent, _, name = path.rpartition(".")
        for slip in (slip for _ in range(rounds) for slip in slips(name, draw)):
            wrong = f"{parent}.{slip}" if parent else slip
            if not slip or wrong in DEEPSPEED or wrong in BLOCKS:
                continue
            number += 1
            right += nearest(wrong, DEEPSPEED) == f"Did you mean {path!r}?"
    return right, number


def test_slips_have_the_right_suggestion() -> None:
    right, number = suggested(1)
    assert number > 1000
    assert right >= 0.95 * number, f"{right} of {number}"


def test_slips_are_refused() -> None:
    draw = random.Random(3)
    for path in draw.sample([*DEEPSPEED], 60):
        wrong = path[:-1]
        if wrong in DEEPSPEED or wrong in BLOCKS or wrong in ALIASES:
            continue
        with pytest.raises(ConfigError, match="there is no such key"):
            read(*ROWS.items(), (wrong, DEEPSPEED[path].default))


TYPED = {**ROWS, "optimizer.type": "AdamW", "scheduler.type": "WarmupLR"}
OFF = [False, "no", "none", None, "off", "false", "No", "None"]


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
@pytest.mark.sampled(2)
def test_off_in_any_spelling_is_never_in_the_way(name: str, whole: bool) -> None:
    """Each key at each spelling of off (in `make test` a third of them), and each block of keys: no refusal names it,
    and nothing raw is raised."""
    table = DEEPSPEED if name == "deepspeed" else ACCELERATE
    for number, path in enumerate([*table, *blocks(tuple(table))]):
        spellings = [*OFF, *([0] if path not in table or table[path].kind is FLAG else [])]
        for value in spellings if whole else spellings[number % 3 :: 3]:
            pairs = [*(TYPED.items() if name == "deepspeed" else [("num_processes", 2)]), (path, value)]
            document = nested(*dict(pairs).items())
            refused = in_the_way(document, None if name == "deepspeed" else 2)
            assert [text for at, text in refused.items() if at == path] == [], value


def in_the_way(document: dict[str, Any], accelerated: int | None = None) -> dict[str, str]:
    """What is in the way, by path, but for what a value would settle."""
    try:
        ds_config(document, world_size=8) if accelerated is None else accelerate_config(document)
    except ConfigError as error:
        return {path: text for path, text in error.refusals if path not in error.open}
    return {}


def test_auto_is_what_the_libraries_make_of_it() -> None:
    """DeepSpeed drops "auto" where pydantic reads the block; a Trainer fills the keys that are marked so."""
    for path, key in DEEPSPEED.items():
        dropped = path.split(".")[0] in PYDANTIC and "." in path
        if dropped and not key.auto:
            assert outcome(read(*ROWS.items(), (path, "auto"))) == BASE, path
        elif key.auto:
            assert path not in in_the_way(nested(*TYPED.items(), (path, "auto"))), path


def test_the_report_says_what_the_given_value_does() -> None:
    lines = {line.path: line.became for line in read(*ROWS.items(), *{
        "fp16.enabled": False, "zero_optimization.overlap_comm": False, "optimizer.type": "AdamW",
        "zero_optimization.ignore_unused_parameters": False, "zero_optimization.contiguous_gradients": False,
        "comms_logger.enabled": "no", "zero_optimization.offload_optimizer.device": "none", "tensorboard": False,
        "optimizer.params.adam_w_mode": False, "optimizer.params.bias_correction": False,
    }.items()).lines}  # fmt: skip
    assert lines["fp16.enabled"] == "nothing: off"
    assert lines["zero_optimization.overlap_comm"] == "Spec(overlap=False); the same bits"
    assert lines["zero_optimization.ignore_unused_parameters"] == "a parameter without a gradient is an error"
    assert lines["zero_optimization.contiguous_gradients"] == "nothing: fzero is so in any case"
    assert lines["comms_logger.enabled"] == "nothing: off"
    assert lines["zero_optimization.offload_optimizer.device"] == "nothing: off"
    assert lines["tensorboard"] == "nothing: off"
    assert lines["optimizer.params.adam_w_mode"] == "of the optimizer"


def test_files_of_accelerate_config_as_it_writes_them() -> None:
    """`accelerate config` quotes its no's, and always writes keys of TPUs."""
    document = {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU", "downcast_bf16": "no",
        "enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0, "main_training_function": "main",
        "mixed_precision": "no", "num_machines": 1, "num_processes": 2, "rdzv_backend": "static", "same_network": True,
        "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
    }  # fmt: skip
    found = accelerate_config(document)
    assert (found["zero"], found.ranks) == (0, 2)
    assert {line.path: line.became for line in found.lines}["downcast_bf16"] == "nothing: off"


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ({"pipe-parallel-size": 1, "model-parallel-size": 1, "num-layers": 12}, "GPT-NeoX"),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}, "Megatron-LM"),
        ({"finetuning_type": "lora", "cutoff_len": 1024, "stage": "sft"}, "LLaMA-Factory"),
        ({"base_model": "x", "sequence_len": 2048, "datasets": []}, "axolotl"),
    ],
)
def test_files_of_other_programs_are_called_by_name(document: dict[str, Any], name: str) -> None:
    for translate in (ds_config, accelerate_config):
        with pytest.raises(ConfigError, match=f"is a file of {name}, not of DeepSpeed or Accelerate"):
            translate(document)


@pytest.mark.parametrize(
    "kind", ["OneBitLamb", "Adamax", "adamw_bnb_8bit", "Adafactor", "SparseAdam", "Adan", "PAdam", "AdEMAMix"]
)
def test_another_algorithm_is_never_suggested(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(*ROWS.items(), ("optimizer.type", kind))
    assert "Did you mean" not in str(error.value)


def test_prescaled_gradients_are_a_hint_and_bias_correction_is_read() -> None:
    assert outcome(read(*ROWS.items(), ("prescale_gradients", True), ("gradient_predivide_factor", 4.0))) == BASE
    found = read(*ROWS.items(), ("optimizer.type", "Adam"), ("optimizer.params.bias_correction", False))
    assert "bias_correction=False" in found.python()

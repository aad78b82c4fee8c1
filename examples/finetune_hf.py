"""Train a Hugging Face causal language model, unmodified, with every tensor of its training sharded over the ranks.

By default: two local ranks, ZeRO stage 3, a 0.1M-parameter Llama over bytes, made from its configuration, on the source
code of Python's own standard library. Sequences end where a line ends, so batches are padded, and the loss is the mean
over all tokens of all ranks. The trained model is saved as Hugging Face saves it; `--model` continues from there.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fzero
import ranks
import text
from fzero.interop import Apply, from_module

try:
    import transformers
except ImportError:
    sys.exit("finetune_hf.py needs transformers: pip install 'fzero[hf]'")

EXAMPLES = """
examples:
  python examples/finetune_hf.py                            two ranks, zero=3
  python examples/finetune_hf.py --arch gpt2 --dropout 0.1  another architecture, with dropout
  python examples/finetune_hf.py --model runs/finetune_hf   a model that save_pretrained wrote (text is read as bytes)
  torchrun --nproc-per-node 4 examples/finetune_hf.py       torchrun's ranks instead of its own

results, in --out: the model (config.json, model.safetensors), program.txt (the step, one op per line), rankN.log
"""

Batch = dict[str, Tensor]
VOCAB, PAD, IGNORED, NEWLINE = 256, 0, -100, 10
HELD_OUT_BATCHES, SAMPLE_BYTES = 4, 64
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}


def configuration(arch: str, sequence: int, dropout: float) -> Any:
    """A tiny configuration of an architecture: the fields that transformers knows, at sizes for a CPU."""
    if arch == "llama":
        return transformers.LlamaConfig(
            **SIZES, **SPECIAL, max_position_embeddings=sequence, attention_dropout=dropout, tie_word_embeddings=True
        )
    if arch == "gpt2":
        drops: dict[str, Any] = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
        return transformers.GPT2Config(**SPECIAL, **drops, n_embd=64, n_layer=2, n_head=4, n_positions=sequence)
    return transformers.MambaConfig(**SPECIAL, hidden_size=64, state_size=8, num_hidden_layers=2)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="finetune_hf.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--world", type=int, metavar="N", help="ranks to start on this machine (2); under torchrun its ranks are used")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage: the same numbers, other memory (3)")
    add("--arch", default="llama", choices=("llama", "gpt2", "mamba"), help="a tiny model of this architecture (llama)")
    add("--model", type=Path, metavar="DIR", help="instead: a causal language model that save_pretrained wrote")
    add("--dropout", type=float, default=0.0, metavar="P", help="of --arch llama and gpt2 (0.0)")
    add("--steps", type=int, default=100, metavar="N", help="optimizer steps (100)")
    add("--batch", type=int, default=16, metavar="N", help="sequences per step, over all ranks (16)")
    add("--seq", type=int, default=96, metavar="N", help="bytes per sequence, at most (96)")
    add("--lr", type=float, default=3e-3, metavar="X", help="peak learning rate: linear warm-up, then cosine (3e-3)")
    add("--precision", default="fp32", choices=("fp32", "bf16"), help="what is computed in (fp32)")
    add("--data", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)")
    add("--out", type=Path, default=Path("runs/finetune_hf"), metavar="DIR", help="where results go (runs/finetune_hf)")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters, the batches and dropout (0)")
    args = parser.parse_args(argv)
    started = ranks.here()
    if started and args.world not in (None, started[1]):
        parser.error(f"--world {args.world}, but torchrun started {started[1]} ranks: leave --world out")
    args.world = started[1] if started else 2 if args.world is None else args.world
    for name in ("world", "steps", "batch", "seq"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: needed a positive number")
    if args.batch % args.world:
        parser.error(f"--batch {args.batch} cannot be cut into {args.world} ranks: needed a multiple of {args.world}")
    for name in ("data", "model"):
        if getattr(args, name) is not None and not getattr(args, name).exists():
            parser.error(f"--{name} {getattr(args, name)}: there is no such file or directory")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train, in ranks of its own unless torchrun started some; returns the exit status."""
    args = parse(argv)
    if ranks.here() is None and args.world > 1:
        command = [sys.executable, str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
        return ranks.launch(command, args.world, args.out)
    rank = (ranks.here() or (0, 1))[0]
    try:
        train(args, rank)
    except KeyboardInterrupt:
        return ranks.STOPPED
    except (fzero.FzeroError, text.TextError) as error:  # meant for the user to read: no traceback
        print(f"finetune_hf.py: rank {rank}: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    return 0


def train(args: argparse.Namespace, rank: int) -> None:
    """The whole job, as one rank does it."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(args.seed)  # every rank makes the same model
    model = load(args)
    params, buffers, apply = from_module(model.train())
    spec = fzero.Spec(
        loss=loss_of(apply, buffers),
        optimizer=fzero.optim.adamw(fzero.optim.warmup_cosine(args.lr, max(1, args.steps // 20), args.steps)),
        mesh={"dp": args.world},
        zero=args.zero,
        precision=args.precision,
        clip_norm=1.0,
    )
    corpus = text.load(args.data, args.seq)
    say = print if rank == 0 else _silent
    say(f"text: {corpus.description}")
    size = sum(value.numel() for value in params.values())
    say(f"{type(model).__name__}: {size:,} parameters, {args.world} ranks, zero={args.zero}")
    state = fzero.init(params, spec, key=fzero.random.key(args.seed))  # what dropout draws from, if there is any
    held_out, measure = held_out_batches(args, corpus, rank), sums_of(from_module(model, train=False).apply, buffers)
    say(f"held-out loss {evaluated(state, held_out, measure):.3f} nats per byte before the first step")
    start = time.perf_counter()
    for number, batch in enumerate(itertools.islice(batches(args, corpus, rank), args.steps), 1):
        state = fzero.step(state, batch)
        if number % max(1, args.steps // 5) == 0 or number == args.steps:
            say(f"step {number}: loss {float(state.metrics['loss']):.3f}")
    seconds = time.perf_counter() - start
    loss = evaluated(state, held_out, measure)
    say(f"held-out loss {loss:.3f} nats per byte; {seconds / args.steps:.2f} s per step")
    leave(args, model, state, rank)


def leave(args: argparse.Namespace, model: Any, state: fzero.State, rank: int) -> None:
    """What stays after the run. Every rank gathers the parameters, rank 0 saves them."""
    model.load_state_dict(fzero.unshard(state.params), strict=False)  # tied names and buffers are not among params
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "program.txt").write_text(str(state.program))
        model.save_pretrained(args.out)
        print(f"a sample: {sample(model.eval(), 'def ')!r}")
        print(f"in {args.out}: config.json, model.safetensors, program.txt")


def _silent(*_: object) -> None: ...


def load(args: argparse.Namespace) -> Any:
    if args.model is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_config(configuration(args.arch, args.seq, args.dropout))


def sums_of(apply: Apply, buffers: dict[str, Tensor]) -> Callable[[Any, Batch], tuple[Tensor, Tensor]]:
    """What a batch adds up to: the sum of its losses, and how many there are (`total`)."""

    def sums(params: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        given = {name: x for name, x in batch.items() if name != "labels"}
        return total(apply(params, buffers, **given, use_cache=False).logits, batch["labels"])

    return sums


def loss_of(apply: Apply, buffers: dict[str, Tensor]) -> Callable[[Any, Batch], fzero.Mean]:
    """The mean over the tokens of all ranks, however many of them each rank holds."""
    sums = sums_of(apply, buffers)

    def loss(params: Any, batch: Batch) -> fzero.Mean:
        return fzero.Mean(*sums(params, batch))

    return loss


def total(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number (f32) of the losses of the next bytes: `logits` (rows, bytes, VOCAB), `labels` (rows, bytes)."""
    labels = labels[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels, ignore_index=IGNORED, reduction="sum")
    return losses, (labels != IGNORED).sum().float()


def padded(x: Tensor) -> Batch:
    """Bytes (rows, bytes), each row cut after its last whole line, as a padded batch."""
    ends = (x == NEWLINE) * torch.arange(1, x.shape[1] + 1)
    last = ends.amax(1, keepdim=True)
    mask = torch.arange(x.shape[1]) < torch.where(last > 1, last, x.shape[1])
    return {"input_ids": x * mask, "attention_mask": mask.long(), "labels": x.masked_fill(~mask, IGNORED)}


def batches(args: argparse.Namespace, corpus: text.Corpus, rank: int) -> Iterator[Batch]:
    """This rank's part of random training batches, for ever."""
    tokens = fzero.data.Tokens(corpus.train, sequence=args.seq, order="random", seed=args.seed)
    for windows in tokens.batches(args.batch, rank=rank, world_size=args.world):
        yield padded(windows["x"])


def held_out_batches(args: argparse.Namespace, corpus: text.Corpus, rank: int) -> list[Batch]:
    """This rank's part of the same few batches each time."""
    sizes = {"num_sequences": args.batch, "sequence": args.seq, "rank": rank, "world_size": args.world}
    windows = text.held_out_batches(corpus.held_out, num_batches=HELD_OUT_BATCHES, **sizes)
    return [padded(window["x"]) for window in windows]


def evaluated(state: fzero.State, held_out: Sequence[Batch], sums: Callable[..., tuple[Tensor, Tensor]]) -> float:
    """The mean loss without dropout, on the sharded state (what it returns are means over the ranks)."""
    found = [fzero.evaluate(state, batch, sums) for batch in held_out]
    return float(sum(x for x, _ in found) / sum(n for _, n in found))


def sample(model: Any, prompt: str) -> str:
    """What the model writes after `prompt`, as far as its positions reach."""
    given = torch.tensor([list(prompt.encode())])
    room = getattr(model.config, "max_position_embeddings", None) or SAMPLE_BYTES
    new = max(1, min(SAMPLE_BYTES, room) - given.shape[1])
    made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=True, top_k=20)
    return bytes(made[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())

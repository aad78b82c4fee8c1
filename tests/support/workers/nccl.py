"""Run under torchrun by test_gpu: five steps on two devices against one process on the global batch."""

from __future__ import annotations

import json
import sys

import cases
import torch

import fzero


def main():
    init, loss = cases.gpt(vocab=256, width=128, depth=2)
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), zero=int(sys.argv[1]), device="cuda")
    params = init(fzero.random.key(0))
    state = fzero.init(params, spec)
    rank = state.runtime.rank
    torch.cuda.set_device(rank)
    alone = params
    for step in range(5):
        whole = cases.tokens(8, 64, 256, step)
        own = {name: x[4 * rank : 4 * rank + 4].cuda().contiguous() for name, x in whole.items()}
        state = fzero.step(state, own)
        _, grads = fzero.value_and_grad(loss)(alone, whole)
        alone = fzero.tree.map(lambda p, g: p - 0.1 * g, alone, grads)
    full = fzero.unshard(state.params)
    pairs = list(zip(fzero.tree.flatten(full)[1], fzero.tree.flatten(alone)[1], strict=True))
    gap = sum(float((a.cpu() - b).double().square().sum()) for a, b in pairs) ** 0.5
    norm = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
    if rank == 0:
        print(json.dumps({"gap": gap / norm}), flush=True)


if __name__ == "__main__":
    main()

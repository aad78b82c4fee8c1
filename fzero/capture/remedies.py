"""remedies: what to write instead, by what torch says or asks for."""

from __future__ import annotations

from fzero.errors import NO_KERNEL

SPARSE = (
    "The tensors of a step are dense. Pass a sparse matrix as its indices and values, in the batch or closed over; "
    "a @ x is then torch.zeros(rows, x.shape[1]).index_add(0, row, value[:, None] * x[column])"
)

PLAIN = (
    "The tensors of a step are plain. Pass x.as_subclass(torch.Tensor), and what the class adds as other tensors; "
    "instead of attn_mask=causal_lower_right(q, k) write attn_mask=torch.ones(q, k, dtype=torch.bool).tril(k - q)"
)
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")  # namespaces of ops
NO_GROUP = "Default process group has not been initialized"  # a ValueError
COLLECTIVE = (
    "is a collective of torch.distributed, and a program has its own transfers. Leave out what averages gradients, the "
    "loss or a metric: fzero does that. For another, in a custom step, write fzero.psum or fzero.pmean; "
    "fzero.axis_index is the rank (docs/recipes.md: a contrastive loss over the global batch)"
)
RAGGED = "Rows of several lengths are one padded tensor and a mask of the lengths (torch.arange(T) < lengths[:, None])"

_STACKED = (
    "Write a Python loop, as in `for x in xs.unbind(0): ...`, and torch.stack its results: the program holds every "
    "turn; with fzero.scan it holds one"
)
_NO_FLEX = (
    "fzero.sparse.attention computes windows, documents, softcaps and tables of blocks; "
    "F.scaled_dot_product_attention takes a mask or a bias as attn_mask="
)
# beginning of the name of an op that takes functions -> the remedy
FUNCTIONS = {
    "cond": "Compute both and choose: torch.where(condition, a, b)",
    "while_loop": "Write a Python loop over a fixed number of turns, and keep the old value where it has ended: "
    "x = torch.where(going_on, new, x)",
    "associative_scan": _STACKED,
    "map": f"{_STACKED}. Or torch.vmap",
    "flex_attention": _NO_FLEX,
}

MIXED = (
    "operands have two dtypes. Cast one, as in x.to(w.dtype). Of a layer that mixes dtypes, as a BatchNorm whose "
    "weight is cast and whose statistics are not, keep all wide: Precision(compute=..., keep={'<its path>/**': 'fp32'})"
)
ALIKE = (
    "on {} this norm needs one dtype. Cast one: F.layer_norm(x.float(), shape, weight, bias).to(x.dtype), or leave out "
    "the rule of Precision(keep=...) for its leaves"
)
NARROW = (
    f"{NO_KERNEL}, or keep the leaves that it reads wide: Precision(compute='bf16', keep={{'<their path>': 'fp32'}})"
)
NO_VIEW = "Cannot view a tensor with shape"  # a ValueError on fake tensors
_NO_CUDA = (
    "torch.cuda is asked of a device, and there is none. Leave torch.cuda.synchronize(), streams, events and counters "
    "out of a step: a program orders its own work. What the step is to know of its device (its capability), ask before "
    "it, and close over the answer (`fzero fake-cuda SCRIPT` answers as an H100)"
)
_BY_PRODUCTS = (
    "a kernel of attention has no derivative of its gradient, and none in forward mode. Around this attention write "
    "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): it is products then, which have both"
)
_MEET = (
    "tensors of two devices meet. A tensor that the functions close over (a module's buffers, a mask) is where it was "
    "made: move it to Spec.device first, or give it in the state or the batch"
)
TORCH_SAYS = {
    "derivative for aten::_scaled_dot_product": _BY_PRODUCTS,
    "forward AD with _scaled_dot_product": _BY_PRODUCTS,
    "Torch not compiled with CUDA enabled": _NO_CUDA,
    "Found no NVIDIA driver": _NO_CUDA,
    "Tried to instantiate dummy base class": _NO_CUDA,
    "requires CUDA support": _NO_CUDA,
    "compiled without CUDA support": _NO_CUDA,
    "NVTX functions not installed": _NO_CUDA,
    "aten._pin_memory": "a tensor's memory is pinned within the step, and a program moves nothing from the host there. "
    "Leave .pin_memory() out; DataLoader(pin_memory=True) pins a batch outside of the step",
    "leaf Variable that requires grad": "a parameter is changed in place: a step is pure. Return a new value instead",
    "returned an invalid gradient": "a gradient has not its value's shape: return one of that shape from a backward "
    "of your own. Of a shape that is changed in place: Write x = x.squeeze() instead of x.squeeze_()",
    "supported for tensor subclasses": "numpy would need a tensor's values, which are known only when the program "
    "runs. Use the torch function, or compute it outside the step and pass it in the batch",
    "mixed dtype (CPU)": MIXED,
    "expected scalar type": MIXED,
    ") should be the same": MIXED,
    "data is not allocated yet": "a tensor's values are needed, which are known only when the program runs. Instead "
    "of torch.tensor([x, y]) write torch.stack([x, y])",
    "passed to FakeTensor.__format__": "a tensor's value would be printed, which is known only when the program runs. "
    "Return it as a metric",
    "_apply(): Couldn't swap": "a module is moved or cast within the step (module.to, .half). Leave the move out, even "
    "to where it is, and move it before from_module. Instead of a cast, cast its input, as in "
    "x.to(self.l.weight.dtype), and say Precision(compute=...) for the weights",
    NO_VIEW: "a view that the tensor's strides do not allow. Write x.reshape(...) instead of "
    "x.view(...), and x = x.transpose(...) instead of x.transpose_(...) and kin, which change views made before",
    "use_reentrant=True": "torch.utils.checkpoint(use_reentrant=True) runs a backward of its own. Say "
    "use_reentrant=False (transformers: gradient_checkpointing_kwargs={'use_reentrant': False}), or leave it out and "
    "give Spec(remat='full')",
    "elem.device.type must be 'meta'": "a tensor is copied with its memory, as by copy.copy(x), which a trace does not "
    "have. Write x.clone(), or use x itself",
    "refers to a single memory location": "a tensor whose elements refer to a single memory location (expand, "
    "expand_as) is changed in place: each would be written several times. Write x = x.clone() first",
    "does not require grad and does not have a grad_fn": "a gradient is asked for of a value that is no function of a "
    "tensor that requires grad (one that is detached, made under no_grad, or closed over). Take it of "
    "x.detach().requires_grad_(), made in the loss",
    "Creating a new Tensor subclass": f"a tensor of another class is made. {PLAIN}",
    "self.shape_env must not be None": f"a nested tensor is made. {RAGGED}",
    "FlexAttention does not support backward": "torch's flex_attention has no gradient on the CPU, and on CUDA it runs "
    f"functions of its own, which a program does not hold. {_NO_FLEX}",
    "not linked with support for": "a tensor is moved to a device that this torch is not built for. Leave .cuda() or "
    ".to(device) out: the tensors of a step are where its state is. (`fzero fake-cuda SCRIPT` has such a device)",
    "found at least two devices": _MEET,
    "found two different devices": _MEET,  # torch 2.11
    "backward through the graph a second time": "a graph that backward() or autograd.grad has freed is needed again. "
    "Leave loss.backward() out: fzero takes the gradient of what the loss returns. For one within the loss write "
    "torch.autograd.grad(y, x, create_graph=True)",
    "\" not implemented for '": NO_KERNEL,
    "Unsupported dtype": NARROW,
    "Low precision dtypes not supported": NARROW,  # torch.linalg
    "half, float and double tensors, but got": NARROW,  # view_as_complex
    NO_GROUP: f"this {COLLECTIVE}",
    "a dynamo-optimized function": "a torch.compiled function is called. Pass the plain one: fzero compiles the step",
}

IN_GENERAL = (
    "Instead of `if x > 0:` write torch.where(x > 0, a, b); instead of x.item() keep the 0-d tensor; "
    "instead of x[mask] multiply by the mask, and instead of x[mask] = y write x = torch.where(mask, y, x); "
    "what does not depend on the state or the batch may be asked for freely, and so may a leaf of the batch that is "
    "given as fzero.static(x): a program of each of its values"
)

DRAWN = (
    "It is drawn at random, at each step anew, and a program has one road: draw it outside of the step. Augment the "
    "batch before fzero.step. What leaves layers out by chance draws only where its own module trains: set "
    "`training = False` of that module alone, before from_module. To choose by a draw within the step, write "
    "torch.where(x < p, a, b)"
)

BUFFER = (
    "self.{0} is a buffer that is in the state, or given to the step. If the first call sets it (ActNorm, a codebook), "
    "run one batch through the module before from_module. One that stays the same leave out of the state, and its "
    "value is known: from_module(module, mutable=(<the names of those that change>,)), and "
    "apply(params, {{**buffers, **changing}}, x). What changes it at each step, switch off in the module. A place in a "
    "queue stays a tensor: self.queue[self.{0} + torch.arange(n)] = x, without int()"
)

INDEXED = (
    "Python's subscript asks a tensor for its number. Instead of x[i] write x[i[None]][0] (of a list xs: "
    "torch.stack(xs)[i[None]][0]), and instead of x[i : i + n] write x[i + torch.arange(n)]. Assignments are "
    "x[i[None]] = y and x[i + torch.arange(n)] = y"
)

# an op that writes to its operand -> the remedy, where it is not to return a new value
IN_PLACE = {
    "aten.embedding_renorm_.default": "max_norm= rescales the rows of a weight that are looked up: leave it out, and "
    "rescale all of them in a step of your own, before the gradient: "
    "w * (max_norm / (w.norm(dim=1, keepdim=True) + 1e-7)).clamp(max=1)",
}

_GLOBAL = (
    "It looks for tokens with global attention, in the product of attention_mask and global_attention_mask: leave "
    "attention_mask= out where nothing is padded, or give both closed over or as fzero.static(mask)"
)

_LAYERDROP = (
    "It leaves layers out by chance (LayerDrop): make the model with layerdrop=0.0, or encoder_layerdrop=0.0 and "
    "decoder_layerdrop=0.0, as in from_pretrained(name, layerdrop=0.0)"
)

_LENGTHS = (
    "It checks lengths: pass lengths=torch.full((rows,), length) of the batch's shape beside attention_mask=, which is "
    "then the mask"
)

MEET = (
    "tensors of two devices meet. A tensor that the functions close over (a module's buffers, a mask) is where it was "
    "made: move it to Spec.device first, or give it in the state or the batch"
)

# part of "op file:line in function `line of code`" -> the remedy. The first that fits is shown.
REMEDIES = {
    "torch/distributions": "It checks its arguments: pass validate_args=False",
    "nn/modules/transformer.py": "It asks whether the mask is causal: pass is_causal=True or False beside mask=, or "
    "make the mask outside of the batch and the state",
    "_pack_padded_sequence": "Lengths of packed sequences are values: run the padded batch, and multiply what comes "
    "out by a mask of the lengths (torch.arange(T) < lengths[:, None]); take last states by torch.gather. The other "
    "direction begins with the padding then: run it as a layer of its own, on rows turned round by torch.gather",
    "one_hot(": "Say num_classes=, as a number: not one of values, as index.max() + 1",
    "aten.repeat_interleave": "Say output_size=, or repeat by an index from the batch",
    "aten.bincount": "Its length is a value: torch.zeros(n).index_add(0, index, ones) has n elements",
    "aten._unique2": "How many there are is a value: torch.sort keeps the shape",
    "gaussian_nll_loss": "It checks that no variance is negative: write 0.5 * (var.log() + (x - y) ** 2 / var) with "
    "var.clamp(min=eps)",
    "aten.unique_consecutive": "How many there are is a value: torch.sort keeps the shape. A classifier of "
    "transformers compares the number of its rows' end tokens so: call the model below its head, and take the state of "
    "the last one by torch.gather",
    "layerdrop": _LAYERDROP,
    "skip_the_layer": _LAYERDROP,
    "isfinite(hidden_states).all()": "It is a check of forwards in training, as DETR's: from_module(module, "
    "train=False) leaves it out, and dropout too; Spec(nonfinite='skip') skips such a step. Boxes that DETR's own loss "
    "matches on the host, match outside of the step, and pass the pairs in the batch",
    "models/xlm/": _LENGTHS,
    "models/flaubert/": _LENGTHS,
    "models/longformer": _GLOBAL,
    "models/led": _GLOBAL,
    "models/prophetnet": "It shifts labels to the right and checks them: pass decoder_input_ids= beside labels=",
    "labels.max()": "It compares labels with the vocabulary, and selects those that are no padding: leave labels= out, "
    "and give F.ctc_loss the padded ones, as F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), labels.clamp(min=0), "
    "input_lengths, (labels >= 0).sum(-1))",
    "float(self.num_batches_tracked)": "A BatchNorm with momentum=None divides by the number of batches so far, a "
    "value of the state: give it a number, as in module.momentum = 0.1, before from_module",
    "torch/ao/quantization": "Its FakeQuantize asks for switches and limits that are buffers. "
    "FusedMovingAvgObsFakeQuantize, as of get_default_qat_qconfig(), is one op and asks for none",
    "torch_geometric": "Say how many nodes there are (num_nodes=, dim_size=), and add self loops outside of the step",
}

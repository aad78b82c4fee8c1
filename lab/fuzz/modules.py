"""modules: the table of `torch.nn` modules: a constructor, and the shapes of what it is called with.

A row is `(constructor, inputs)`, each a function of a `Draw`; inputs are texts of operands. Parameters become leaves of
the state, buffers constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lab.fuzz.operands import Draw

Row = Callable[[Draw], str]
Shape = tuple[int, ...]


def _row(constructor: str, *shapes: Shape, parts: Sequence[str] = ("",)) -> Row:
    """A module of fixed sizes: its inputs are fitted to shapes. `parts` of its result, as "[0]", are drawn."""

    def row(g: Draw) -> str:
        inputs = [g.fitted(shape) for shape in shapes]
        return _called(g, constructor, inputs, parts)

    return row


def _pointwise(constructor: str) -> Row:
    return lambda g: _called(g, constructor, [g.single()])


def _loss(constructor: str) -> Row:
    def row(g: Draw) -> str:
        x = g.single(2, 2)
        return _called(g, constructor, [x, g.like(x)])

    return row


def _classes(constructor: str) -> Row:
    def row(g: Draw) -> str:
        x = g.single(2, 2)
        rows, classes = g.value(x).shape
        return _called(g, constructor, [x, f"fit({g.ints()}, ({rows},)) % {classes}"])

    return row


def _called(g: Draw, constructor: str, inputs: Sequence[str], parts: Sequence[str] = ("",)) -> str:
    name = g.module(constructor)
    own = f'p["{name}"]' if name in g.names["p"] else "{}"
    return f"call({name}, {own}, {', '.join(inputs)}){g.some(*parts)}"


def _embedding(constructor: str, high: int) -> Row:
    return lambda g: _called(g, constructor, [f"fit({g.ints()}, (2, 3)) % {high}"])


MODULES: dict[str, Row] = {
    "Linear": _row("nn.Linear(3, 4)", (2, 3)),
    "Linear without bias": _row("nn.Linear(4, 2, bias=False)", (3, 4)),
    "Bilinear": _row("nn.Bilinear(2, 3, 2)", (3, 2), (3, 3)),
    "Identity": _pointwise("nn.Identity()"),
    "Conv1d": _row("nn.Conv1d(2, 3, 2, padding=1)", (1, 2, 4)),
    "Conv2d": _row("nn.Conv2d(2, 4, 2, stride=2, padding=1)", (1, 2, 4, 3)),
    "Conv2d in groups": _row('nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular")', (1, 4, 3, 3)),
    "Conv3d": _row("nn.Conv3d(1, 2, 2)", (1, 1, 3, 2, 3)),
    "ConvTranspose1d": _row("nn.ConvTranspose1d(2, 3, 2, stride=2)", (1, 2, 3)),
    "ConvTranspose2d": _row("nn.ConvTranspose2d(2, 2, 2, output_padding=1, stride=2)", (1, 2, 2, 2)),
    "ConvTranspose3d": _row("nn.ConvTranspose3d(1, 1, 2)", (1, 1, 2, 2, 2)),
    "Unfold": _row("nn.Unfold(2)", (1, 2, 3, 3)),
    "Fold": _row("nn.Fold((3, 3), 2)", (1, 4, 4)),
    "MaxPool1d": _row("nn.MaxPool1d(2)", (1, 2, 5)),
    "MaxPool2d": _row("nn.MaxPool2d(2, stride=1, padding=1)", (1, 2, 3, 4)),
    "MaxPool3d": _row("nn.MaxPool3d(2)", (1, 1, 2, 4, 3)),
    "AvgPool1d": _row("nn.AvgPool1d(2, ceil_mode=True)", (1, 2, 5)),
    "AvgPool2d": _row("nn.AvgPool2d(2, count_include_pad=False, padding=1)", (1, 2, 3, 4)),
    "AvgPool3d": _row("nn.AvgPool3d(2)", (1, 1, 2, 4, 3)),
    "FractionalMaxPool2d": _row(
        "nn.FractionalMaxPool2d(2, output_size=2, _random_samples=torch.full((1, 2, 2), 0.4))", (1, 2, 5, 4)
    ),
    "LPPool1d": _row("nn.LPPool1d(2, 2)", (1, 2, 4)),
    "LPPool2d": _row("nn.LPPool2d(2, 2)", (1, 2, 4, 4)),
    "AdaptiveMaxPool1d": _row("nn.AdaptiveMaxPool1d(2)", (1, 2, 5)),
    "AdaptiveMaxPool2d": _row("nn.AdaptiveMaxPool2d((2, 1))", (1, 2, 3, 4)),
    "AdaptiveMaxPool3d": _row("nn.AdaptiveMaxPool3d(2)", (1, 1, 3, 2, 3)),
    "AdaptiveAvgPool1d": _row("nn.AdaptiveAvgPool1d(1)", (1, 2, 5)),
    "AdaptiveAvgPool2d": _row("nn.AdaptiveAvgPool2d(1)", (2, 3, 3, 2)),
    "AdaptiveAvgPool2d of 2": _row("nn.AdaptiveAvgPool2d((2, None))", (1, 3, 3, 2)),
    "AdaptiveAvgPool3d": _row("nn.AdaptiveAvgPool3d(1)", (1, 2, 2, 3, 2)),
    "ReflectionPad1d": _row("nn.ReflectionPad1d(2)", (1, 2, 4)),
    "ReflectionPad2d": _row("nn.ReflectionPad2d(1)", (1, 2, 3, 3)),
    "ReplicationPad2d": _row("nn.ReplicationPad2d((1, 0, 2, 1))", (1, 2, 3, 3)),
    "ReplicationPad3d": _row("nn.ReplicationPad3d(1)", (1, 1, 2, 2, 2)),
    "ZeroPad2d": _row("nn.ZeroPad2d((1, -1, 0, 2))", (1, 2, 3, 3)),
    "ConstantPad1d": _row("nn.ConstantPad1d(1, 0.5)", (1, 2, 3)),
    "CircularPad2d": _row("nn.CircularPad2d(1)", (1, 2, 3, 3)),
    **{
        name: _pointwise(f"nn.{name}()")
        for name in (
            "ReLU", "ReLU6", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Tanh", "Sigmoid", "Hardtanh", "Hardswish",
            "Hardsigmoid", "Hardshrink", "Softshrink", "Tanhshrink", "LeakyReLU", "LogSigmoid", "Softplus", "Softsign",
        )
    },
    "PReLU": _row("nn.PReLU(3)", (2, 3, 2)),
    "Threshold": _pointwise("nn.Threshold(0.1, 0.2)"),
    "GLU": _row("nn.GLU(1)", (2, 4)),
    "Softmax": _row("nn.Softmax(1)", (2, 4)),
    "Softmin": _row("nn.Softmin(-1)", (2, 4)),
    "Softmax2d": _row("nn.Softmax2d()", (1, 3, 2, 2)),
    "LogSoftmax": _row("nn.LogSoftmax(-1)", (2, 4)),
    "AdaptiveLogSoftmaxWithLoss log_prob": _row("nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(0))", (2, 3)),
    "BatchNorm1d": _row("nn.BatchNorm1d(3, eps=0.1)", (4, 3)),
    "BatchNorm2d": _row("nn.BatchNorm2d(2, eps=0.1)", (2, 2, 3, 2)),
    "BatchNorm2d in evaluation": _row("nn.BatchNorm2d(2).eval()", (2, 2, 3, 2)),
    "BatchNorm3d": _row("nn.BatchNorm3d(1, eps=0.1, affine=False)", (2, 1, 2, 2, 2)),
    "InstanceNorm1d": _row("nn.InstanceNorm1d(2, eps=0.1, affine=True)", (2, 2, 4)),
    "InstanceNorm2d": _row("nn.InstanceNorm2d(2, eps=0.1, track_running_stats=True)", (1, 2, 3, 2)),
    "GroupNorm": _row("nn.GroupNorm(2, 4, eps=0.1)", (2, 4, 2)),
    "LayerNorm": _row("nn.LayerNorm((3, 2), eps=0.1)", (2, 3, 2)),
    "LayerNorm without bias": _row("nn.LayerNorm(4, eps=0.1, bias=False)", (3, 4)),
    "RMSNorm": _row("nn.RMSNorm(4, eps=0.1)", (3, 4)),
    "LocalResponseNorm": _row("nn.LocalResponseNorm(2)", (1, 4, 3)),
    "RNN": _row("nn.RNN(3, 2)", (2, 1, 3)),
    "LSTM": _row("nn.LSTM(3, 2, batch_first=True)", (2, 2, 3), parts=("[0]", "[1]")),
    "LSTM of two layers": _row("nn.LSTM(2, 2, 2, bidirectional=True)", (2, 1, 2), parts=("[0]", "[1]")),
    "GRU": _row("nn.GRU(3, 2, bidirectional=True)", (2, 2, 3)),
    "RNNCell": _row("nn.RNNCell(3, 2)", (2, 3)),
    "LSTMCell": _row("nn.LSTMCell(3, 2)", (2, 3)),
    "GRUCell": _row("nn.GRUCell(3, 2)", (2, 3)),
    "MultiheadAttention": _row("nn.MultiheadAttention(4, 2, batch_first=True)", (1, 3, 4), (1, 2, 4), (1, 2, 4)),
    "MultiheadAttention with bias_kv": _row(
        "nn.MultiheadAttention(4, 1, add_bias_kv=True)", (2, 1, 4), (2, 1, 4), (2, 1, 4)
    ),
    "TransformerEncoderLayer": _row("nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)", (3, 1, 4)),
    "TransformerEncoderLayer, norm first": _row(
        'nn.TransformerEncoderLayer(4, 1, 5, dropout=0.0, norm_first=True, batch_first=True, activation="gelu")',
        (1, 3, 4),
    ),
    "TransformerDecoderLayer": _row("nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0)", (2, 1, 4), (3, 1, 4)),
    "Embedding": _embedding("nn.Embedding(5, 3)", 5),
    "Embedding with padding": _embedding("nn.Embedding(5, 3, padding_idx=1)", 5),
    "Embedding of bounded norm": _embedding("nn.Embedding(5, 3, scale_grad_by_freq=True)", 5),
    "EmbeddingBag": _embedding('nn.EmbeddingBag(5, 3, mode="sum")', 5),
    "CosineSimilarity": _row("nn.CosineSimilarity(eps=0.1)", (3, 2), (3, 2)),
    "PairwiseDistance": _row("nn.PairwiseDistance(p=2.0, eps=0.1)", (3, 2), (3, 2)),
    "L1Loss": _loss("nn.L1Loss()"),
    "MSELoss": _loss('nn.MSELoss(reduction="sum")'),
    "SmoothL1Loss": _loss("nn.SmoothL1Loss()"),
    "HuberLoss": _loss("nn.HuberLoss(delta=0.4)"),
    "BCEWithLogitsLoss": lambda g: _called(
        g, "nn.BCEWithLogitsLoss()", [(x := g.single()), f"torch.sigmoid({g.like(x)})"]
    ),
    "KLDivLoss": lambda g: _called(
        g, 'nn.KLDivLoss(reduction="batchmean", log_target=True)',
        [f"F.log_softmax({(x := g.single(2))}, -1)", f"F.log_softmax({g.like(x)}, -1)"],
    ),
    "CrossEntropyLoss": _classes("nn.CrossEntropyLoss()"),
    "CrossEntropyLoss, smoothed": _classes("nn.CrossEntropyLoss(label_smoothing=0.2)"),
    "NLLLoss": _classes("nn.NLLLoss()"),
    "MultiMarginLoss": _classes("nn.MultiMarginLoss(p=2)"),
    "PoissonNLLLoss": lambda g: _called(g, "nn.PoissonNLLLoss()", [(x := g.single()), f"{g.like(x)}.abs()"]),
    "SoftMarginLoss": lambda g: _called(
        g, "nn.SoftMarginLoss()", [(x := g.single(1)), f"torch.sign({g.like(x)}.detach() + 0.01)"]
    ),
    "PixelShuffle": _row("nn.PixelShuffle(2)", (1, 4, 2, 2)),
    "PixelUnshuffle": _row("nn.PixelUnshuffle(2)", (1, 1, 4, 2)),
    "ChannelShuffle": _row("nn.ChannelShuffle(2)", (1, 4, 2, 2)),
    "Upsample": _row('nn.Upsample(scale_factor=2, mode="bilinear")', (1, 2, 2, 3)),
    "UpsamplingNearest2d": _row("nn.UpsamplingNearest2d(scale_factor=2)", (1, 2, 2, 3)),
    "Flatten": _row("nn.Flatten()", (2, 3, 2)),
    "Unflatten": _row("nn.Unflatten(1, (2, 3))", (2, 6)),
    "Sequential in place": _row("nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))", (2, 3)),
    "Sequential, tied": _row("nn.Sequential(*[nn.Linear(3, 3)] * 2, nn.SiLU(inplace=True))", (2, 3)),
    "weight_norm": _row("nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))", (2, 3)),
}  # fmt: skip

DROPPING: dict[str, Row] = {
    "Dropout": _pointwise("nn.Dropout(0.3)"),
    "Dropout1d": _row("nn.Dropout1d(0.3)", (2, 2, 3)),
    "Dropout2d": _row("nn.Dropout2d(0.3)", (2, 2, 2, 2)),
    "AlphaDropout": _pointwise("nn.AlphaDropout(0.2)"),
    "TransformerEncoderLayer with dropout": _row("nn.TransformerEncoderLayer(4, 1, 4, dropout=0.3)", (2, 1, 4)),
}

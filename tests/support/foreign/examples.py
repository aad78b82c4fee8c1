"""The shapes of pytorch/examples, and what strangers stumbled over, rewritten small."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.nn.utils import rnn, spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as parametrized_spectral_norm
from torch.nn.utils.parametrizations import weight_norm

from foreign.case import Batch, Case

Model = Callable[..., Any]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def images(side: int = 16, channels: int = 1) -> Batch:
    g = generator()
    return {"x": torch.rand(2, channels, side, side, generator=g), "y": torch.randint(0, 10, (2,), generator=g)}


def vectors() -> Batch:
    g = generator()
    return {"x": torch.randn(4, 8, generator=g), "y": torch.randint(0, 3, (4,), generator=g)}


def words() -> Batch:
    g = generator()
    ids = torch.randint(0, 20, (2, 7), generator=g)
    return {"x": ids[:, :-1], "y": ids[:, 1:], "lengths": torch.tensor([6, 4])}


def graph() -> Batch:
    edges = (torch.rand(6, 6, generator=generator()) < 0.4).float() + torch.eye(6)
    x = torch.randn(6, 8, generator=generator())
    return {"x": x, "adjacency": (edges / edges.sum(1, keepdim=True)).to_sparse(), "y": torch.arange(6) % 3}


def dense_graph() -> Batch:
    batch = graph()
    return {**batch, "adjacency": batch["adjacency"].to_dense()}


def classified(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def next_word(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"])


def of_graph(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["adjacency"]), batch["y"])


# --- images -----------------------------------------------------------------------------------------------------------


def mnist() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(288, 10), nn.LogSoftmax(1))


def super_resolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))


def enlarged(model: Model, batch: Batch) -> Tensor:
    return F.mse_loss(model(F.avg_pool2d(batch["x"], 2)), batch["x"])


def style() -> nn.Module:
    down = nn.ReflectionPad2d(1), nn.Conv2d(1, 4, 3, stride=2), nn.InstanceNorm2d(4, affine=True), nn.ReLU()
    return nn.Sequential(*down, nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(4, 1, 3, padding=1))


def reconstructed(model: Model, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["x"])


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        up = nn.ConvTranspose2d(8, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 4)
        self.generator = nn.Sequential(*up, nn.Tanh())
        down = norm(nn.Conv2d(1, 8, 4, 4)), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), norm(nn.Conv2d(8, 1, 4)), nn.Flatten()
        self.discriminator = nn.Sequential(*down)

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.discriminator(real), self.discriminator(self.generator(noise))


def adversarial(model: Model, batch: Batch) -> Tensor:
    real, fake = model(batch["x"], batch["noise"])
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def noisy() -> Batch:
    return {**images(), "noise": torch.randn(2, 8, 1, 1, generator=generator())}


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(784, 8))
        self.head = nn.Sequential(nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.net(x), self.net(x.flip(0))], 1)).squeeze(1)


def matched(model: Model, batch: Batch) -> Tensor:
    return F.binary_cross_entropy(model(batch["x"]), (batch["y"] > 4).float())


class Rows(nn.Module):
    """mnist_rnn: an image as a sequence of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm, self.head = nn.LSTM(16, 8, batch_first=True), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.head(self.norm(self.rnn(x.squeeze(1))[0][:, -1])), 1)


# --- distributions ----------------------------------------------------------------------------------------------------


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return mean, (log_variance / 2).exp(), self.decoder(mean)


def vae(model: Model, batch: Batch) -> Tensor:
    mean, deviation, made = model(batch["x"])
    posterior = distributions.Normal(mean, deviation)
    prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    likelihood = distributions.Normal(made, torch.ones_like(made)).log_prob(batch["x"])
    return distributions.kl_divergence(posterior, prior).sum(1).mean() - likelihood.sum(1).mean()


def vae_that_draws(model: Model, batch: Batch) -> Tensor:
    mean, deviation, made = model(batch["x"])
    return F.mse_loss(made, batch["x"]) + distributions.Normal(mean, deviation).rsample().pow(2).mean()


def vae_unchecked(model: Model, batch: Batch) -> Tensor:
    mean, deviation, _ = model(batch["x"])
    posterior = distributions.Normal(mean, deviation, validate_args=False)
    prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
    return distributions.kl_divergence(posterior, prior).sum(1).mean()


def reinforce(model: Model, batch: Batch) -> Tensor:
    return -(distributions.Categorical(logits=model(batch["x"])).log_prob(batch["y"]) * batch["x"][:, 0]).mean()


# --- sequences --------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """word_language_model with recurrent layers; with tied weights."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool = False) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(20, 8), kind(8, 8, 2, batch_first=True), nn.Linear(8, 20)
        self.head.weight = self.embed.weight
        self.packed = packed

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        if not self.packed:
            return self.head(self.rnn(x)[0])
        packed = rnn.pack_padded_sequence(x, torch.tensor([6, 4]) if lengths is None else lengths, batch_first=True)
        return self.head(rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def next_packed_word(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["lengths"]).transpose(1, 2), batch["y"])


class Attending(nn.Module):
    """word_language_model with nn.TransformerEncoder; how its mask is said."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.said = said

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        padding = {"src_key_padding_mask": x == 0} if "padded" in self.said else {}
        said = {name: value for name, value in self.said.items() if name != "padded"}
        return self.head(self.encoder(self.embed(x), mask=mask, **said, **padding))


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.transformer(self.embed(x.flip(1)), self.embed(x), tgt_mask=mask, tgt_is_causal=True))


class Sines(nn.Module):
    """time_sequence_prediction: cells in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(1, 6), nn.LSTMCell(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = first = x.new_zeros(len(x), 6), x.new_zeros(len(x), 6)
        outputs = []
        for column in x.split(1, 1):
            first = self.first(column, first)
            state = self.second(first[0], state)
            outputs.append(self.head(state[0]))
        return torch.cat(outputs, 1)


def spoken() -> Batch:
    g = generator()
    given = torch.randn(2, 12, 8, generator=g), torch.randint(1, 5, (2, 4), generator=g)
    lengths = torch.tensor([12, 10]), torch.tensor([4, 3])
    return dict(zip(("x", "y", "x_lengths", "y_lengths"), (*given, *lengths), strict=True))


def ctc(model: Model, batch: Batch) -> Tensor:
    logits = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logits, batch["y"], batch["x_lengths"], batch["y_lengths"])


def ctc_of_one_length(model: Model, batch: Batch) -> Tensor:
    return F.ctc_loss(model(batch["x"]).log_softmax(-1).transpose(0, 1), batch["y"], (12, 12), (4, 4))


# --- graphs -----------------------------------------------------------------------------------------------------------


class Gcn(nn.Module):
    def __init__(self, adjacency: Tensor | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.adjacency = adjacency

    def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
        adjacency = self.adjacency if self.adjacency is not None else adjacency
        return torch.mm(adjacency, self.second(torch.mm(adjacency, self.first(x)).relu()))


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(8, 3), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.project(x)
        scores = F.leaky_relu((h @ self.score[:3])[:, None] + (h @ self.score[3:])[None])
        return scores.masked_fill(adjacency == 0, -9e15).softmax(1) @ h


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3))


def tree_of(batch: Batch, *names: str) -> Batch:
    return {name: batch[name] for name in names}


def speech() -> nn.Module:
    return nn.Linear(8, 5)


CASES: dict[str, Case] = {
    "mnist": Case(mnist, images, classified),
    "mnist_rnn": Case(Rows, images, classified),
    "siamese_network": Case(Siamese, images, matched),
    "super_resolution": Case(super_resolution, images, enlarged),
    "fast_neural_style": Case(style, images, reconstructed),
    "dcgan": Case(Pair, noisy, adversarial),
    "dcgan, BatchNorm without mutable": Case(Pair, noisy, adversarial, mutable=False),
    "dcgan, spectral_norm": Case(lambda: Pair(spectral_norm), noisy, adversarial),
    "dcgan, parametrized spectral_norm": Case(lambda: Pair(parametrized_spectral_norm), noisy, adversarial),
    "dcgan, spectral_norm without mutable": Case(
        lambda: nn.Sequential(spectral_norm(nn.Linear(8, 3))), vectors, classified, mutable=False
    ),
    "weight_norm": Case(normed, vectors, classified),
    "vae": Case(Vae, vectors, vae),
    "vae, that draws": Case(Vae, vectors, vae_that_draws),
    "vae, validate_args=False": Case(Vae, vectors, vae_unchecked),
    "reinforce": Case(mlp, vectors, reinforce),
    "word_language_model, LSTM": Case(lambda: Words(nn.LSTM), words, next_word),
    "word_language_model, GRU": Case(lambda: Words(nn.GRU), words, next_word),
    "word_language_model, packed": Case(lambda: Words(nn.LSTM, True), words, next_packed_word),
    "word_language_model, packed to known lengths": Case(lambda: Words(nn.LSTM, True), words, next_word),
    "word_language_model, Transformer, mask=": Case(Attending, words, next_word),
    "word_language_model, Transformer, is_causal=True": Case(lambda: Attending(is_causal=True), words, next_word),
    "word_language_model, Transformer, padded": Case(lambda: Attending(padded=True), words, next_word),
    "language_translation": Case(Translation, words, next_word),
    "time_sequence_prediction": Case(
        Sines, lambda: {"x": torch.randn(2, 6, generator=generator())}, lambda m, b: F.mse_loss(m(b["x"]), b["x"])
    ),
    "speech, CTC": Case(speech, spoken, ctc),
    "speech, CTC of known lengths": Case(speech, spoken, ctc_of_one_length),
    "gcn, adjacency in the batch": Case(Gcn, graph, of_graph),
    "gcn, adjacency a constant": Case(
        lambda: Gcn(graph()["adjacency"]), lambda: tree_of(graph(), "x", "y"), classified
    ),
    "gcn, dense adjacency": Case(Gcn, dense_graph, of_graph),
    "gat": Case(Gat, dense_graph, of_graph),
}
FAMILIES = CASES


def case(name: str) -> Case:
    return CASES[name]

"""fourier: complex numbers and Fourier transforms."""

from __future__ import annotations

from lab.fuzz.ops.rows import Row

COMPLEX: dict[str, Row] = {
    "complex": lambda g: f"torch.complex({(x := g.full())}, {g.like(x)})",
    "polar": lambda g: f"torch.polar({(x := g.full())}.abs() + 0.1, {g.like(x)})",
    "view_as_complex": lambda g: f"torch.view_as_complex({g.fitted((g.int(1, 3), 2))}.contiguous())",
    "view_as_real": lambda g: f"torch.view_as_real({g.complex()}.resolve_conj())",
    "real": lambda g: f"{g.complex()}.{g.some('real', 'imag')}",
    "abs_complex": lambda g: f"{g.complex()}.abs()",
    "angle": lambda g: f"torch.angle({g.complex()} + 4.0)",
    "conj": lambda g: f"{g.complex()}.conj()",
    "resolve_conj": lambda g: f"{g.complex()}.conj().resolve_conj() * 2.0",
    "times": lambda g: f"{(z := g.complex())} * {g.some('(0.5 - 0.3j)', z + '.conj()', 1.5)}",
    "complex_exp": lambda g: f"torch.exp({g.complex()} * 0.3)",
    "complex_unary": lambda g: (
        f"torch.{g.some('sin', 'tanh', 'sqrt', 'reciprocal', 'sigmoid', 'log')}({g.complex()} * 0.3 + 1.5)"
    ),
    "complex_div": lambda g: f"{(z := g.complex())} / ({z}.abs() + 1.0)",
    "complex_matmul": lambda g: f"{(z := g.complex(2))} @ {z}.mH",
    "complex_sum": lambda g: f"{g.complex()}.{g.some('sum', 'mean', 'cumsum')}({g.int(0, 0)})",
    "complex_view": lambda g: (
        f"{g.complex(1)}.{g.some('flip(0)', 'reshape(-1)', 'clone()', 'unsqueeze(0)', 'mT')}"
    ),
    "fft": lambda g: f"torch.fft.{g.some('fft', 'ifft')}({g.full(1)}, norm='{g.some('backward', 'ortho')}')",
    "rfft": lambda g: f"torch.fft.rfft({g.full(1)}, dim={g.dim()})",
    "irfft": lambda g: f"torch.fft.irfft({g.full(1)}, n={g.int(3, 5)})",
    "fft2": lambda g: f"torch.fft.{g.some('fft2', 'ifft2', 'fftn')}({g.full(2)})",
    "rfftn": lambda g: f"torch.fft.rfftn({g.full(2)})",
    "fftshift": lambda g: f"torch.fft.fftshift({g.full(1)})",
    "hfft": lambda g: f"torch.fft.hfft({g.full(1)}, n=4)",
    "stft": lambda g: (
        f"torch.stft({g.fitted(g.some((8,), (2, 8)))}, 4, {g.int(1, 4)}, window=torch.hann_window(4), "
        f"center={g.some(True, False)}, return_complex=True)"
    ),
    "istft": lambda g: (
        f"torch.istft(torch.stft({g.fitted((8,))}, 4, 2, window=torch.ones(4), return_complex=True), 4, 2, "
        "window=torch.ones(4))"
    ),
}  # fmt: skip

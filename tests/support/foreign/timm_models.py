"""The smallest member of every family of timm that is small enough, on small images, in training mode."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreign.case import Batch, Case

NARROW = {"embed_dim": 48, "depth": 2, "num_heads": 3}
STAGES = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}

# family (a module of timm.models): its smallest member, the side of an image, and what makes it smaller
FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", 64, {**NARROW, "img_size": 64}),
    "byoanet": ("halonet_h1", 256, {}),
    "byobnet": ("test_byobnet", 64, {}),
    "cait": ("cait_xxs24_224", 64, {"img_size": 64, "depth": 3}),
    "coat": ("coat_tiny", 64, {"img_size": 64, "serial_depths": (1, 1, 1, 1), "parallel_depth": 1}),
    "convit": ("convit_tiny", 64, {"img_size": 64, "depth": 4, "local_up_to_layer": 3}),
    "convmixer": ("convmixer_768_32", 64, {}),
    "convnext": ("test_convnext", 64, {}),
    "cpubone": ("cpubone_nano", 64, {"drop_path_rate": 0.0}),
    "crossvit": ("crossvit_tiny_240", 240, {}),
    "csatv2": ("csatv2", 64, {}),
    "cspnet": ("cs3darknet_focus_s", 64, {}),
    "cspnext": ("cspnext_tiny", 64, {}),
    "davit": (
        "davit_tiny",
        64,
        {"embed_dims": (24, 48, 96, 192), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8), "window_size": 2},
    ),
    "deit": ("deit_tiny_patch16_224", 64, {"img_size": 64, "depth": 2}),
    "densenet": ("densenet121", 64, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "dla": ("dla46x_c", 64, {}),
    "dpn": ("dpn48b", 64, {"k_sec": (1, 1, 1, 1)}),
    "edgenext": ("edgenext_xx_small", 64, {}),
    "efficientformer": ("efficientformer_l1", 224, {"depths": (1, 1, 1, 2), "embed_dims": (16, 32, 48, 64)}),
    "efficientformer_v2": ("efficientformerv2_s0", 224, {"depths": (1, 1, 1, 3)}),
    "efficientnet": ("test_efficientnet", 64, {}),
    "efficientvim": ("efficientvim_m1", 64, {}),
    "efficientvit_mit": ("efficientvit_b0", 64, {}),
    "efficientvit_msra": ("efficientvit_m0", 128, {"img_size": 128}),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", 64, {"img_size": 64, "depth": 2}),
    "fasternet": ("fasternet_t0", 64, {}),
    "fastvit": ("fastvit_t8", 64, {"layers": (1, 1, 1, 1)}),
    "gcvit": ("gcvit_xxtiny", 64, {"img_size": 64, "embed_dim": 16, "window_size": (2, 2, 2, 2)}),
    "ghostnet": ("ghostnet_050", 64, {}),
    "hardcorenas": ("hardcorenas_b", 64, {}),
    "hgnet": ("hgnetv2_b0", 64, {}),
    "hiera": ("hiera_tiny_224", 64, {"img_size": 64, "embed_dim": 24, "stages": (1, 1, 2, 1)}),
    "hieradet_sam2": ("sam2_hiera_tiny", 64, {"embed_dim": 24, "stages": (1, 1, 2, 1), "global_att_blocks": (3,)}),
    "hrnet": ("hrnet_w18_small", 64, {}),
    "iformer": ("iformer_t", 64, {}),
    "inception_next": ("inception_next_atto", 64, {}),
    "inception_v3": ("inception_v3", 107, {}),
    "lcnetv2": ("lcnetv2_small", 64, {}),
    "levit": ("levit_128s", 224, {}),
    "lowformer": ("lowformer_b0", 64, {}),
    "mambaout": ("test_mambaout", 64, {}),
    "maxxvit": ("test_coatnet", 64, {"img_size": 64}),
    "metaformer": ("poolformerv2_s12", 64, {}),
    "mlp_mixer": ("gmlp_ti16_224", 64, {"img_size": 64}),
    "mobilenetv3": ("lcnet_035", 64, {}),
    "mobilevit": ("mobilevit_xxs", 64, {}),
    "naflexvit": ("naflexvit_base_patch16_gap", 64, {**NARROW}),
    "nfnet": ("test_nfnet", 64, {}),
    "pit": ("pit_ti_224", 64, {"img_size": 64}),
    "pvt_v2": ("pvt_v2_b0", 64, {}),
    "rdnet": ("rdnet_tiny", 64, {"num_init_features": 16, "growth_rates": (8, 16, 16, 16, 16, 16, 24)}),
    "regnet": ("regnetx_002", 64, {}),
    "repghost": ("repghostnet_050", 64, {}),
    "repvit": ("repvit_m1", 64, {"embed_dim": (16, 32, 48, 64), "depth": (1, 1, 2, 1)}),
    "res2net": ("res2net50_14w_8s", 64, {"layers": (1, 1, 1, 1)}),
    "resnest": ("resnest14d", 64, {}),
    "resnet": ("test_resnet", 64, {}),
    "resnetv2": ("resnetv2_18", 64, {"channels": (16, 32, 48, 64), "stem_chs": 16}),
    "rexnet": ("rexnet_100", 64, {}),
    "selecsls": ("selecsls42", 64, {}),
    "senet": ("legacy_seresnet18", 64, {"layers": (1, 1, 1, 1)}),
    "sequencer": (
        "sequencer2d_s",
        64,
        {"img_size": 64, "layers": (1, 1, 1, 1), "embed_dims": (24, 48, 48, 48), "hidden_sizes": (6, 12, 12, 12)},
    ),
    "shvit": ("shvit_s1", 64, {}),
    "sknet": ("skresnet18", 64, {"layers": (1, 1, 1, 1)}),
    "starnet": ("starnet_s050", 64, {}),
    "swiftformer": ("swiftformer_xs", 64, {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 64, {**STAGES, "img_size": 64, "window_size": 4}),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", 64, {**STAGES, "img_size": 64, "window_size": 4}),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", 64, {**STAGES, "img_size": 64}),
    "tiny_vit": (
        "tiny_vit_5m_224",
        64,
        {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 64, 64), "num_heads": (1, 2, 2, 2)},
    ),
    "tnt": ("tnt_s_legacy_patch16_224", 64, {"img_size": 64, "depth": 2, "embed_dim": 48, "inner_dim": 12}),
    "tresnet": ("tresnet_m", 64, {"layers": (1, 1, 1, 1), "width_factor": 0.25}),
    "twins": ("twins_svt_small", 64, {"img_size": 64, "embed_dims": (16, 32, 64, 64), "depths": (2, 2, 2, 2)}),
    "vision_transformer": ("test_vit", 64, {"img_size": 64}),
}


def case(family: str) -> Case:
    name, side, options = FAMILIES[family]

    def make() -> nn.Module:
        return (
            importlib.import_module("timm")
            .create_model(name, pretrained=False, num_classes=10, drop_rate=0.0, **options)
            .train()
        )

    def batch() -> Batch:
        g = torch.Generator().manual_seed(1)
        return {"x": torch.randn(2, 3, side, side, generator=g), "y": torch.randint(0, 10, (2,), generator=g)}

    return Case(make, batch, classified)


def classified(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Cross entropy; of two heads (distillation) the sum."""
    found = model(batch["x"])
    return sum((F.cross_entropy(x, batch["y"]) for x in ([found] if isinstance(found, Tensor) else found)), 0)

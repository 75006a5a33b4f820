"""Versions in NVIDIA's images compared with a recipe's needs."""

import pytest

from superpod.runtime.runs.versions import IGNORE
from superpod.slurm.preflight import images
from superpod.slurm.preflight.preflight import findings
from superpod.slurm.profiles import profiles
from tests.slurm.preflight.test_preflight import case, profile


@pytest.mark.parametrize("name", ["nvcr.io#nvidia/nemo:25.09", "docker://nvcr.io#nvidia/nemo:25.09.00"])
def test_unsuitable_image_is_refused_with_versions(name):
    (finding,) = findings(case(profile(container__image=name)))
    for words in ("nemo_toolkit is 2.5.0", "megatron-core is 0.14.0", "transformer-engine is 2.7.0", "2.9 or later"):
        assert words in finding.message
    assert "docs/slurm.md" in finding.hint


def test_no_public_image_has_the_pinned_versions():
    refused = [tag for tag in images.IMAGES if images.problems(f"nvcr.io/nvidia/nemo:{tag}", case().run, {})]
    assert refused == list(images.IMAGES)


def test_needs_of_a_recipe_apply_with_unproven_versions():
    taken = profile(container__image="nvcr.io/nvidia/nemo:25.09", env={IGNORE: "1"})
    assert findings(case(taken)) == []
    (finding,) = findings(case(taken, recipe="gpt_oss_20b_pretrain_h100_bf16", nodes=2))
    assert "2.8 or later: learned softmax offsets" in finding.message
    (small3,) = findings(case(taken, recipe="mistral_small3_24b_lora_h100_bf16", nodes=1))
    assert "MistralSmall3Config24B" in small3.message


@pytest.mark.parametrize(
    "name", ["", "/lustre/images/nemo-25.09.sqsh", "ghcr.io/me/nemo:25.09", "nvcr.io/nvidia/nemo:27.01"]
)
def test_unknown_images_are_not_checked(name):
    assert images.versions_in(name) is None


def test_default_profiles_use_no_public_image():
    for name in ("dgx_a100", "dgx_b200", "dgx_gb200", "dgx_h100", "dgx_h200"):
        image = profiles.load(name).container.image
        assert image.endswith("superpod-nemo-2.7.3.sqsh")
        assert images.versions_in(image) is None

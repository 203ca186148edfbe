"""Known models are those that were published; times follow from operations and bytes; files say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.errors import ConfigurationError
from resihp.scheduler.cost.profile import check
from resihp.scheduler.what_if import catalogue

PUBLISHED = {  # parameters in billions, from the models' papers and cards
    "llama2-7b": 6.74,
    "llama2-13b": 13.0,
    "llama2-30b": 32.5,
    "llama2-70b": 69.0,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "llama3-405b": 405.0,
}


def test_a_file_says_of_which_precision_its_model_is(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    shape = "layers = 4\nhidden = 64\nheads = 8\nffn_hidden = 256\nvocab = 512\n"
    for said, precision in (("", "fp32"), ('precision = "bf16"', "bf16"), ('precision = "fp32"', "fp32")):
        file.write_text(shape + said)
        assert catalogue.model(str(file), 128).precision == precision
    file.write_text(shape + "precision = 16")
    with pytest.raises(ConfigurationError, match="precision is 'fp32' or 'bf16', got 16"):
        catalogue.model(str(file), 128)


def test_models_have_as_many_parameters_as_published() -> None:
    assert set(PUBLISHED) == set(catalogue.KNOWN_MODELS)
    for name, billions in PUBLISHED.items():
        assert catalogue.model(name, 4096).parameters / 1e9 == pytest.approx(billions, rel=0.01), name


@pytest.mark.parametrize("name", sorted(PUBLISHED))
@pytest.mark.parametrize("hardware", sorted(catalogue.KNOWN_HARDWARE))
def test_every_known_model_has_a_profile(name: str, hardware: str) -> None:
    model = catalogue.model(name, 4096)
    device = catalogue.hardware(hardware)
    check(catalogue.profile(model, device, sequence_length=4096, tp=4, pp=2, dp=2), model)


def test_an_iteration_takes_six_operations_for_each_parameter_and_token_and_the_attention() -> None:
    model, device = catalogue.model("llama2-13b", 4096), catalogue.hardware("a100")
    found = catalogue.profile(model, device, sequence_length=4096, micro_batch_size=2)
    every = found.span(0, model.layers - 1).total * device.flops
    tokens = 2 * 4096
    embedding = model.vocab_rows * model.hidden  # looks up, multiplies nothing
    linear = 6 * (model.parameters - embedding) * tokens
    attention = model.layers * 3.5 * 2 * 4096 * model.hidden * tokens
    assert every == pytest.approx(linear + attention, rel=0.01)
    assert every > linear + attention  # the loss and the embedding pass over memory


def test_backward_and_weights_take_about_the_forward() -> None:
    layer = catalogue.profile(
        catalogue.model("llama2-13b", 8192), catalogue.hardware("a100"), sequence_length=8192
    ).layers[0]
    assert layer.w < layer.f < layer.b < 1.25 * layer.f
    assert layer.w > 0.8 * layer.f


def test_a_llama3_8b_layer_is_near_what_others_measured() -> None:
    """OctoPipe's authors give F 1.74, B 1.97, W 1.08 ms; their degree and length are not known, so shares only."""
    measured = (1.74, 1.97, 1.08)
    model = catalogue.model("llama3-405b", 8192)
    layer = catalogue.profile(model, catalogue.hardware("h100"), sequence_length=8192).layers[0]
    for mine, theirs in zip((layer.f, layer.b, layer.w), measured, strict=True):
        assert mine / layer.total == pytest.approx(theirs / sum(measured), abs=0.12)


def test_communication_follows_from_bytes() -> None:
    model, device = catalogue.model("llama2-13b", 8192), catalogue.hardware("a100")

    def profile(tp: int = 1, dp: int = 2, size: int = 1, inside: bool = False) -> catalogue.Profile:
        return catalogue.profile(
            model, device, sequence_length=8192, micro_batch_size=size, tp=tp, pp=4, dp=dp, gradients_inside=inside
        )

    one = profile()
    assert one.transfer_s == pytest.approx(8192 * 5120 * 2 / device.between_bytes_per_s)
    assert one.inside_s == pytest.approx(8192 * 5120 * 2 / device.inside_bytes_per_s)
    assert profile(size=2).transfer_s == pytest.approx(2 * one.transfer_s)
    assert one.transfer_s / 4 < profile(tp=4).transfer_s < one.transfer_s / 2  # a quarter each, then gathered
    assert one.gradient_s == pytest.approx(model.parameters_per_layer * 2 / device.between_bytes_per_s)
    assert profile(dp=4).gradient_s == pytest.approx(1.5 * one.gradient_s)
    assert profile(dp=1).gradient_s == 0
    assert profile(inside=True).gradient_s < one.gradient_s / 10
    assert profile(tp=4).step_s == pytest.approx(one.step_s / 4)


def test_52_heads_cannot_be_cut_in_eight() -> None:
    model = catalogue.model("llama2-30b", 4096)
    assert model.tensor_parallel_obstacle(4) is None
    assert "52 attention heads" in (model.tensor_parallel_obstacle(8) or "")


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("layers = 12\nhidden = 768\nheads = 12\nffn_hidden = 3072\nvocab = 50257\n")
    found = catalogue.model(str(file), 1024)
    assert (found.layers, found.kv_groups, found.sequence, found.gated) == (12, 12, 1024, False)
    assert found.parameters == pytest.approx(162e6, rel=0.01)  # GPT-2 small, its embedding counted twice


def test_heads_may_be_wider_than_their_share_of_the_hidden_state(tmp_path: Path) -> None:
    file = tmp_path / "qwen3.toml"
    file.write_text(
        "layers = 36\nhidden = 2560\nheads = 32\nkv_groups = 8\nkv_channels = 128\nqk_layernorm = true\n"
        "ffn_hidden = 9728\nvocab = 151936\ngated = true\ntied_embeddings = true\n"
    )
    assert catalogue.model(str(file), 4096).parameters == pytest.approx(4.02e9, rel=0.01)  # Qwen3-4B
    file.write_text(file.read_text().replace("kv_channels = 128\n", "").replace("2560", "2561"))
    with pytest.raises(ConfigurationError, match="hidden 2561 cannot be divided by heads 32"):
        catalogue.model(str(file), 4096)


def test_hardware_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "v100.toml"
    file.write_text(
        "flops = 60e12\nmemory_bytes = 32e9\nmemory_bytes_per_s = 7e11\n"
        "inside_bytes_per_s = 100e9\nbetween_bytes_per_s = 10_000_000_000\n"
    )
    found = catalogue.hardware(str(file))
    assert (found.flops, found.memory_bytes, found.between_bytes_per_s) == (60e12, 32_000_000_000, 1e10)


LAYERS = "layers = 12\nhidden = 768\nheads = 12\nffn_hidden = 3072\nvocab = 50257\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LAYERS + "ffn_hiden = 1\n", "unknown key ffn_hiden; did you mean ffn_hidden?"),
        ("layers = 12\n", "hidden, heads, ffn_hidden, vocab missing"),
        (LAYERS.replace("12", "0", 1), "layers is a whole number of at least 1, got 0"),
        (LAYERS.replace("12", "true", 1), "layers is a whole number of at least 1, got True"),
        (LAYERS + 'gated = "yes"\n', "gated is true or false, got 'yes'"),
        (LAYERS.replace("768", "770"), "hidden 770 cannot be divided by heads 12"),
        (LAYERS + "kv_groups = 5\n", "heads 12 cannot be divided by kv_groups 5"),
        ("layers 12", "not TOML"),
    ],
)
def test_a_model_file_that_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"mine\.toml") as caught:
        catalogue.model(str(file), 1024)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("flop = 1e12\n", "unknown key flop; did you mean flops?"),
        ("flops = 1e12\n", "memory_bytes, memory_bytes_per_s, inside_bytes_per_s, between_bytes_per_s missing"),
    ],
)
def test_a_hardware_file_that_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        catalogue.hardware(str(file))
    assert said in str(caught.value)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "true", '"80GB"'])
def test_a_rate_that_is_none(tmp_path: Path, value: str) -> None:
    device = catalogue.KNOWN_HARDWARE["a100"]
    file = tmp_path / "mine.toml"
    keys = {key: f"{getattr(device, key)}" for key in device.__struct_fields__} | {"flops": value}
    file.write_text("\n".join(f"{key} = {content}" for key, content in keys.items()))
    with pytest.raises(ConfigurationError, match="flops is a number above 0"):
        catalogue.hardware(str(file))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml: cannot be read: No such file"):
        catalogue.model(str(tmp_path / "nowhere.toml"), 1024)
    with pytest.raises(ConfigurationError, match=r"model llama-13b: not known; did you mean llama2-13b\?"):
        catalogue.model("llama-13b", 1024)
    with pytest.raises(ConfigurationError, match=r"hardware tpu: not known; valid: a100, h100"):
        catalogue.hardware("tpu")

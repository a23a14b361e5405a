"""The report of a conversion: every linear layer, whether it is in FP8, and why not."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import fp8lt
from fp8lt import ConversionReport, LinearReport, convert_to_float8_training

FILTERED = "module_filter_fn returned False"
READ = "nn.MultiheadAttention reads the weight and calls no layer: see fp8_autocast"


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q": nn.Linear(16, 16), "k": nn.Linear(16, 16)})
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.tok = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 100, bias=False)


def converted(model: nn.Module, **options: object) -> ConversionReport:
    """Convert; return the report. Whether it warns is asked elsewhere."""
    report = ConversionReport()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fp8lt: no layer was converted")
        assert convert_to_float8_training(model, report=report, **options) is model
    return report


def named(*names: str) -> ConversionReport:
    """Return a report of layers with these names, all converted alike."""
    recipe = fp8lt.DynamicScaling()
    return ConversionReport([LinearReport(name, (16, 16), recipe) for name in names])


def cells(report: ConversionReport) -> list[tuple[str, int]]:
    """Return the first two columns of the table: names, and how many layers they are."""
    _, *lines, _ = str(report).splitlines()
    return [(line.split()[0], int(line.split()[1])) for line in lines]


# ------------------------------------------------------------------------------------------ lines


def test_every_linear_has_a_line_in_module_order_with_its_shape_and_recipe() -> None:
    model = Model(blocks=2)
    report = converted(model, config="rowwise")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(layers) == 9
    assert report.layers == [
        LinearReport(name, (m.in_features, m.out_features), m.recipe, None, None)
        for name, m in layers.items()
    ]
    assert list(report.converted) == list(layers)
    assert set(report.converted.values()) == {fp8lt.RowwiseScaling()}
    assert report.skipped == {}


def test_a_root_layer_has_no_name_and_the_table_says_so() -> None:
    report = converted(nn.Linear(3, 4))
    assert report.layers == [LinearReport("", (3, 4), fp8lt.DynamicScaling())]
    assert cells(report) == [("(root)", 1)]


def test_what_the_filter_leaves_is_told() -> None:
    report = converted(Model(1), module_filter_fn=lambda _, name: name.startswith("blocks.0.attn"))
    assert list(report.converted) == ["blocks.0.attn.q", "blocks.0.attn.k"]
    assert report.skipped == dict.fromkeys(["blocks.0.up", "blocks.0.down", "head"], FILTERED)


def test_subclasses_are_told_both_ways() -> None:
    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 8))
    report = converted(model)
    assert list(report.converted) == ["1"]
    assert report.skipped == {
        "0": f"a subclass of nn.Linear, {Scaled.__module__}.{Scaled.__qualname__}: "
        "convert_subclasses=True converts it"
    }
    report = converted(model, convert_subclasses=True)
    assert list(report.converted) == ["0", "1"]
    assert report.skipped == {}


def test_a_subclass_that_the_filter_leaves_is_told_as_such() -> None:
    report = converted(Scaled(8, 8), convert_subclasses=True, module_filter_fn=lambda *_: False)
    assert report.skipped == {"": FILTERED}


def test_a_parametrized_layer_is_told_before_and_after() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.utils.parametrizations.weight_norm(model[0])
    report = converted(model)
    assert "convert before it is parametrized" in report.skipped["0"]
    nn.utils.parametrizations.weight_norm(model[1])
    assert list(converted(model).converted) == ["1"]


def test_layers_that_another_class_would_break_stay_as_they_are() -> None:
    """A lazy layer knows no sizes yet, and a parametrized one computes its weight."""
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(nn.LazyLinear(8), computed, nn.Linear(8, 8))
    report = converted(model, convert_subclasses=True)
    assert list(report.converted) == ["2"]
    assert "not known yet" in report.skipped["0"]
    assert "convert before it is parametrized" in report.skipped["1"]
    x = torch.randn(2, 5)
    model(x).sum().backward()
    assert list(converted(model, convert_subclasses=True).converted) == ["0", "2"]
    model(x).sum().backward()


def test_what_scripts_and_forwards_of_ones_own_do_is_not_promised() -> None:
    class Own(fp8lt.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(input, self.weight)

    class Calls(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.out_proj(x)

    model = nn.ModuleDict({
        "script": torch.jit.script(nn.Linear(8, 8)), "own": Own(8, 8), "replaced": nn.Linear(8, 8),
        "calls": Calls(8, 2), "plain": nn.Linear(8, 8),
    })  # fmt: skip
    model["replaced"].forward = lambda x: x
    lines = {line.name: line for line in converted(model, convert_subclasses=True).layers}
    assert list(lines) == ["own", "replaced", "calls.out_proj", "plain"]
    for name, line in lines.items():
        told = "it has a forward of its own, which may not use FP8"
        assert line.note == (told if name in ("own", "replaced") else None)
        assert line.recipe is not None


def test_layers_converted_before_are_told_with_their_own_recipes() -> None:
    class Twice(fp8lt.Linear):
        pass

    model = nn.Sequential(fp8lt.Linear(8, 8, recipe="delayed"), nn.Linear(8, 8), Twice(8, 8))
    report = converted(model, config="rowwise", module_filter_fn=lambda *_: True)
    assert [recipe.name for recipe in report.converted.values()] == [
        "delayed", "rowwise", "tensorwise"
    ]  # fmt: skip
    assert list(converted(model, module_filter_fn=lambda *_: False).converted) == ["0", "1", "2"]


def test_a_layer_with_two_names_has_one_line() -> None:
    layer = nn.Linear(8, 8)
    report = converted(nn.ModuleDict({"a": layer, "b": layer}))
    assert list(report.converted) == ["a"]
    assert report.layers[0].note is None


# ------------------------------------------------------------------- what only looks like a linear


@pytest.mark.parametrize("convert_subclasses", [False, True])
def test_attention_of_torch_is_told_not_to_be_in_fp8(convert_subclasses: bool) -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 16)})
    report = converted(model, convert_subclasses=convert_subclasses)
    assert [(line.name, line.shape) for line in report.layers] == [
        ("attn.in_proj_weight", (8, 24)), ("attn.out_proj", (8, 8)), ("up", (8, 16))
    ]  # fmt: skip
    assert report.skipped == {"attn.in_proj_weight": READ, "attn.out_proj": READ}
    assert report.share == 128 / (192 + 64 + 128)


def test_attention_of_torch_calls_no_layer_even_if_converted() -> None:
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(5, 1, 8)
    plain, _ = attention(x, x, x)
    converted(attention, convert_subclasses=True)
    assert type(attention.out_proj) is fp8lt.Linear
    attended, _ = attention(x, x, x)
    assert torch.equal(attended, plain)
    with fp8lt.fp8_autocast():  # what the reason recommends
        attended, _ = attention(x, x, x)
    assert not torch.equal(attended, plain)


def test_attention_of_several_widths_has_a_line_for_each_projection() -> None:
    report = converted(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))
    assert [(line.name, line.shape) for line in report.layers] == [
        ("q_proj_weight", (8, 8)), ("k_proj_weight", (4, 8)), ("v_proj_weight", (6, 8)),
        ("out_proj", (8, 8)),
    ]  # fmt: skip
    assert set(report.skipped.values()) == {READ}


def test_bilinear_is_told_not_to_be_in_fp8() -> None:
    report = converted(nn.Sequential(nn.Bilinear(4, 5, 6), nn.Linear(8, 10)))
    assert report.layers[0] == LinearReport("0", (4, 5, 6), None, "nn.Bilinear has no FP8 form")
    assert report.share == 80 / 200
    assert "4 x 5 x 6" in str(report)


def test_layers_that_a_fused_kernel_may_read_have_a_note() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = converted(encoder)
    notes = {line.name: line.note for line in report.layers}
    told = "nn.TransformerEncoderLayer may read the weight in evaluation without gradients"
    assert notes == {
        "self_attn.in_proj_weight": None, "self_attn.out_proj": None,
        "linear1": told, "linear2": told,
    }  # fmt: skip
    assert list(report.converted) == ["linear1", "linear2"]


def test_parts_that_a_subclass_lacks_are_no_error() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    del encoder.linear1, encoder.self_attn.out_proj
    assert list(converted(encoder).converted) == ["linear2"]


# ------------------------------------------------------------------------------------------- ties


def test_a_head_tied_to_an_embedding_is_in_fp8_and_says_so() -> None:
    model = Model(1)
    model.head.weight = model.tok.weight
    *others, head = converted(model).layers
    assert head.recipe == fp8lt.DynamicScaling()
    assert (head.reason, head.note) == (
        None, "FP8 here; its weight is also that of tok (Embedding)"
    )  # fmt: skip
    assert {line.note for line in others} == {None}


def test_all_others_that_have_a_weight_are_named() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(8, 8))
    model.a, model.b = nn.Linear(8, 8), nn.Linear(8, 8)
    model.a.weight = model.b.weight = model.weight
    model.a.bias = model.b.bias
    a, b = converted(model, module_filter_fn=lambda _, name: name == "a").layers
    assert a.note == "FP8 here; its weight is also that of (root) (Module), b (Linear)"
    assert (b.recipe, b.reason, b.note) == (None, FILTERED, None)


def test_shared_biases_and_missing_ones_are_no_ties() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=i < 2) for i in range(4)))
    model[0].bias = model[1].bias
    assert {line.note for line in converted(model).layers} == {None}


# -------------------------------------------------------------------------------------- the table


def test_the_table_is_aligned_folded_and_ends_in_a_summary() -> None:
    model = Model(12)
    model.head.weight = model.tok.weight
    told = "FP8 here; its weight is also that of tok (Embedding)"
    report = converted(model, module_filter_fn=lambda _, name: "up" not in name)
    assert str(report).splitlines() == [
        "layer                 count  in x out  recipe      note",
        "blocks.{0-11}.attn.q     12  16 x 16   tensorwise",
        "blocks.{0-11}.attn.k     12  16 x 16   tensorwise",
        f"blocks.{{0-11}}.up         12  16 x 32   -           {FILTERED}",
        "blocks.{0-11}.down       12  32 x 16   tensorwise",
        f"head                      1  16 x 100  tensorwise  {told}",
        "in FP8: 37 of 49 linears, 69.3 % of their weights",
    ]


def test_the_share_is_that_of_the_weights() -> None:
    model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 20), nn.Linear(20, 5, bias=False))
    report = converted(model, module_filter_fn=lambda _, name: name != "1")
    assert report.share == 400 / 1000
    assert str(report).endswith("\nin FP8: 2 of 3 linears, 40.0 % of their weights")


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["h.0.q", "h.1.q", "h.2.q"], [("h.{0-2}.q", 3)]),
        (["h.0.q", "h.1.q", "h.5.q", "h.7.q", "h.8.q"], [("h.{0-1,5,7-8}.q", 5)]),
        (["h.9.q", "h.10.q", "h.8.q"], [("h.{8-10}.q", 3)]),
        (["0", "1", "3"], [("{0-1,3}", 3)]),
        (["h.0.w1", "h.0.w3", "h.1.w1", "h.1.w3"], [("h.{0-1}.w{1,3}", 4)]),
        (["h.0.q", "h.0.k", "h.1.q", "h.1.k"], [("h.{0-1}.q", 2), ("h.{0-1}.k", 2)]),
        (["h.0", "h0", "h.1", "h1"], [("h.{0-1}", 2), ("h{0-1}", 2)]),
        (["h.3.q"], [("h.3.q", 1)]),
        (["h.00", "h.01", "h.10", "h.11"], [("h.00", 1), ("h.01", 1), ("h.{10-11}", 2)]),
    ],
)
def test_names_that_differ_in_numbers_only_are_folded(
    names: list[str], folded: list[tuple[str, int]]
) -> None:
    assert cells(named(*names)) == folded


def test_braces_never_name_a_layer_that_is_not_there() -> None:
    names = [f"h.{i}.e.{j}" for i in range(4) for j in range(4) if (i, j) != (1, 2)]
    assert cells(named(*names)) == [("h.{0,2-3}.e.{0-3}", 12), ("h.1.e.{0-1,3}", 3)]
    diagonal = [f"h.{i}.e.{i}" for i in range(3)]
    assert cells(named(*diagonal)) == [(name, 1) for name in diagonal]


@pytest.mark.parametrize(
    "other",
    [
        LinearReport("h.1", (16, 32), fp8lt.DynamicScaling()),
        LinearReport("h.1", (16, 16), fp8lt.RowwiseScaling()),
        LinearReport("h.1", (16, 16), fp8lt.DynamicScaling(), None, "a note"),
        LinearReport("h.1", (16, 16), None, FILTERED),
    ],
    ids=["shape", "recipe", "note", "reason"],
)
def test_layers_that_differ_in_anything_else_are_not_folded(other: LinearReport) -> None:
    report = named("h.0")
    report.layers.append(other)
    assert cells(report) == [("h.0", 1), ("h.1", 1)]


def test_layers_left_for_other_reasons_are_not_folded() -> None:
    report = converted(nn.Sequential(nn.Linear(8, 8), Scaled(8, 8)), module_filter_fn=lambda *_: 0)
    assert cells(report) == [("0", 1), ("1", 1)]


def test_options_of_a_recipe_are_shown_where_its_name_does_not_say_them() -> None:
    recipes = [
        fp8lt.DynamicScaling(emulate=True), fp8lt.DelayedScaling(margin=1, amax_history_len=4),
        fp8lt.RowwiseScaling(folded=True), fp8lt.BlockScaling(),
    ]  # fmt: skip
    layers = [LinearReport(f"h.{i}", (8, 8), recipe) for i, recipe in enumerate(recipes)]
    _, *lines, _ = str(ConversionReport(layers)).splitlines()
    assert [line.split(None, 5)[-1] for line in lines] == [
        "tensorwise, emulate=True", "delayed, margin=1, amax_history_len=4", "rowwise_folded",
        "blockwise",
    ]  # fmt: skip


# ------------------------------------------------------------------------------- the report itself


def test_a_report_is_started_anew_by_the_next_conversion() -> None:
    report = ConversionReport()
    convert_to_float8_training(nn.Linear(3, 4), report=report)
    first = report.layers
    convert_to_float8_training(nn.Sequential(nn.Linear(5, 6)), report=report)
    assert [line.name for line in report.layers] == ["0"]
    assert [line.name for line in first] == [""]


def test_a_report_of_a_conversion_that_failed_has_nothing_of_the_one_before() -> None:
    report = converted(nn.Linear(3, 4))
    with pytest.raises(ZeroDivisionError):
        convert_to_float8_training(
            nn.Linear(3, 4), module_filter_fn=lambda *_: 1 / 0, report=report
        )
    assert report.layers == []


@pytest.mark.parametrize("module", [nn.Sequential(), nn.ReLU(), nn.LazyLinear(4)])
def test_a_model_without_weights_of_linears_has_a_share_of_nothing(module: nn.Module) -> None:
    report = converted(module)
    assert report.share == 0
    assert len(report.layers) == isinstance(module, nn.Linear)
    assert (str(report) == "no linear layer found") is not isinstance(module, nn.Linear)


@pytest.mark.filterwarnings("error:fp8lt")
def test_the_warning_comes_with_a_report_too_which_is_filled_by_then() -> None:
    layer, report = nn.Linear(3, 4), ConversionReport()
    with pytest.raises(UserWarning, match=r"^fp8lt: no layer was converted: no nn\.Linear passed"):
        convert_to_float8_training(layer, module_filter_fn=lambda *_: False, report=report)
    assert report.skipped == {"": FILTERED}


@pytest.mark.parametrize(
    ("wrong", "came"), [({}, "dict"), (True, "bool"), (ConversionReport, "type")]
)
def test_what_is_no_report_is_refused_before_anything_changes(wrong: object, came: str) -> None:
    layer = nn.Linear(3, 4)
    with pytest.raises(TypeError, match=rf"^report: want a fp8lt\.ConversionReport, got {came}$"):
        convert_to_float8_training(layer, report=wrong)  # type: ignore[arg-type]
    assert type(layer) is nn.Linear


def test_a_report_works_on_meta_and_holds_no_tensors() -> None:
    with torch.device("meta"):
        model = Model(1)
        model.head.weight = model.tok.weight
        model.big = nn.Linear(100_000, 100_000)
    report = converted(model, module_filter_fn=lambda _, name: name != "big")
    assert report.layers == copy.deepcopy(report.layers)
    assert report.skipped == {"big": FILTERED}
    assert report.layers[-2].note == "FP8 here; its weight is also that of tok (Embedding)"
    assert math.isclose(report.share, 3136 / 10_000_003_136)


def test_the_report_of_weights_that_fsdp_gathers_in_fp8_is_the_same() -> None:
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[2].weight = model[0].weight
    config = fp8lt.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    plain = converted(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="'2': it has other users"):
        assert converted(model, config=config) == plain
    assert plain.layers[-1].note is not None


def test_a_report_changes_nothing_in_a_conversion() -> None:
    def keep(_: nn.Module, name: str) -> bool:
        seen.append(name)
        return name != "2"

    def attributes(layer: nn.Module) -> dict[str, object]:
        return {k: v for k, v in vars(layer).items() if k not in ("_parameters", "_modules")}

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), Scaled(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2)
    )
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    parameters, seen = list(one.parameters()), []
    for convert_subclasses in (False, True):
        options = {"module_filter_fn": keep, "convert_subclasses": convert_subclasses}
        converted(one, **options)
        with_report, seen = seen, []
        convert_to_float8_training(other, **options)
        assert seen == with_report
        seen = []
        assert repr(one) == repr(other)
        assert [attributes(m) for m in one.modules()] == [attributes(m) for m in other.modules()]
    assert all(a is b for a, b in zip(one.parameters(), parameters, strict=True))
    assert one.state_dict().keys() == model.state_dict().keys()

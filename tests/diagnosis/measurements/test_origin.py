"""The first number that is not finite is looked for in the batch that it was seen in."""

import pytest
import torch
from torch import nn

from hookcb import Callback, Diagnose, Learner, watch
from hookcb.diagnosis.measurements.origin import LOOK
from tests.support import first, fit


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def data(n=4):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=g), torch.randn(8, 1, generator=g)) for _ in range(n)]


def found(model, batches=None, cbs=()):
    learn = Learner(batches or data(), model, nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
    with pytest.warns(UserWarning, match="NaN or infinite|is nan"):  # at once, while the fit runs
        verdict = fit(learn, 1, cbs=[Diagnose(show=False), *cbs]).diagnose()
    return next((f for f in verdict.findings if f.code in ("nonfinite.first", "input.nonfinite")), None)


def net(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 1))


def test_the_layer_that_makes_it_is_named_with_its_operation():
    finding = found(net(Log()))
    assert (finding.code, finding.layer, finding.step) == ("nonfinite.first", "1", 0)
    assert "comes from log in the forward of layer 1 (Log)" in finding.message


def test_of_a_package_the_line_is_named_from_its_folder_on_and_is_not_to_be_changed(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "loss.py"
    file.write_text("from torch import nn\n\nclass Net(nn.Linear):\n    def forward(self, x):\n")
    with file.open("a") as lines:
        lines.write("        return super().forward(x) / (x - x).sum()\n")
    scope = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    own = found(scope["Net"](4, 1))
    monkeypatch.setattr("hookcb.core.whose.INSTALLED", (f"{tmp_path}/",))
    installed = found(scope["Net"](4, 1))
    assert f"at {file}:5: return super()" in own.message
    assert own.next_steps == ("add a small number to the divisor",)
    assert ", at package/loss.py:5: return super()" in installed.message
    assert installed.next_steps == (LOOK,)


def test_an_input_that_is_not_finite_is_told_as_that():
    batches = data()
    batches[2][0][3, 1] = torch.nan
    finding = found(net(), batches)
    assert (finding.code, finding.step) == ("input.nonfinite", 2)


def test_weights_that_are_not_finite_already_are_named_by_the_last_of_them():
    def spoil(cb):
        if cb.training and cb.iter == 1:
            with torch.no_grad():
                cb.model[1].weight.fill_(torch.inf)

    finding = found(net(), cbs=[Callback(name="spoil", before_batch=spoil)])
    assert (finding.code, finding.layer, finding.step, finding.value) == ("nonfinite.first", "1", 1, 1.0)
    assert "weights of 1 layer became NaN or infinite" in finding.message


@pytest.mark.filterwarnings("ignore:ERROR  A number is NaN or infinite:UserWarning")
@pytest.mark.parametrize("mode", [True, False])
def test_in_a_loop_that_is_watched_modes_are_as_before(mode):
    model = net(Log(), nn.Dropout(0.1))
    model[2].train(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, Diagnose(show=False)) as w:
        for x, y in data():
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [m.training for m in model] == [True, True, mode, True]
    assert w.diagnose().primary.layer == "1"


@pytest.mark.parametrize("kind", first([torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]))
def test_frozen_weights_of_one_byte_do_not_hide_a_nan(kind):
    """As quantized weights with trained adapters beside them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    base = torch.randn(8, 8).to(kind)
    model.base = nn.Parameter(base, requires_grad=False)
    model[0].register_forward_hook(lambda m, args, out: out + model.base.float().mean())
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with watch(model, opt, Diagnose("ignore", show=False)) as w:
        for i, (x, y) in enumerate(data(12)):
            loss = nn.functional.mse_loss(model(x), y) * (float("nan") if i == 8 else 1)
            loss.backward()
            if i != 8:
                opt.step()
            opt.zero_grad()
    verdict = w.diagnose()
    assert [x.code for x in verdict.findings if x.severity == "error"] == ["nonfinite.first"]
    assert "failed" not in str(verdict)


@pytest.mark.filterwarnings("ignore:ERROR  A number is NaN or infinite:UserWarning")
@pytest.mark.parametrize(
    ("spoil", "text", "advice"),
    [
        (torch.log, "comes from log in the loss", "clamp its input, x.clamp(min=1e-8)"),
        (lambda x: x * torch.nan, "it comes from the loss, or from code between the two", "DetectAnomaly"),
    ],
)
def test_in_a_loop_whose_loss_is_reported_the_operation_of_the_loss_is_named(spoil, text, advice):
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose(show=False)) as w:
        for x, y in data():
            w.report_loss(loss := spoil(-nn.functional.mse_loss(model(x), y)))
            loss.backward()
            opt.step()
    finding = w.diagnose().primary
    assert (finding.code, finding.step) == ("nonfinite.first", 0)
    assert text in finding.message
    assert advice in finding.next_steps[0]


class Masked(nn.Module):
    """Its scores of forbidden classes are -inf."""

    def __init__(self, mask=float("-inf")):
        super().__init__()
        self.layer, self.mask = nn.Linear(4, 3), mask

    def forward(self, x):
        return self.layer(x).masked_fill(torch.tensor([False, False, True]), self.mask)


def of_loop(model, spoil=lambda x: x, cbs="ignore"):
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, Diagnose(cbs, show=False)) as w:
        for x, y in data(30):
            w.report_loss(loss := spoil(nn.functional.cross_entropy(model(x), (y[:, 0] > 0).long())))
            loss.backward()
            opt.step()
            opt.zero_grad()
    return w.diagnose()


def test_scores_that_are_masked_by_minus_inf_are_no_alarm():
    torch.manual_seed(0)
    assert not [x for x in of_loop(Masked()).findings if x.code == "nonfinite.first"]


def test_masked_scores_are_not_blamed_for_what_the_loss_does():
    torch.manual_seed(0)
    finding = of_loop(Masked(), lambda loss: (loss - loss).log()).primary
    assert finding.layer == ""
    assert "The model's output has no NaN; the first NaN or infinity comes from log in the loss" in (
        finding.message
    )


def test_plus_inf_in_the_output_is_an_alarm_at_once():
    torch.manual_seed(0)
    finding = of_loop(Masked(float("inf"))).primary
    assert "The model's output is not finite at step 0" in finding.message


def test_what_is_known_is_not_advised_again():
    torch.manual_seed(0)
    finding = found(net(Log()))
    assert finding.next_steps == ("clamp its input, x.clamp(min=1e-8)",)
    steps = found(net(Times())).next_steps
    assert steps == ("Print the smallest and largest number of its inputs at that place",)


class Times(nn.Module):
    def forward(self, x):
        return torch.atanh(x.abs() + 2)


class Shifted(nn.Linear):
    def forward(self, x, shift=9.0):
        return super().forward((x + shift).log())


@pytest.mark.filterwarnings("ignore:ERROR  A number is NaN or infinite:UserWarning")
def test_a_batch_that_is_run_again_has_its_keyword_arguments_beside_positional_ones():
    model = Shifted(4, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, Diagnose(show=False)) as w:
        model(data()[0][0], shift=-9.0).square().mean().backward()
        opt.step()
    (finding,) = (x for x in w.diagnose().findings if x.code == "nonfinite.first")
    assert "comes from log in" in finding.message

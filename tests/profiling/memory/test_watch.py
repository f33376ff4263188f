"""Bytes by layer are those that torch keeps, to the byte."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.profiling.memory.support import FLOAT, LONG, Blocks, batches_for, kept_by_hand, mlp, watch
from tests.support import in_turn

BS = 8


def test_an_mlp_keeps_what_its_layers_need():
    stats = watch(mlp())
    kept = {row.name: row.kept for row in stats.layers()}
    relu = BS * 5 * FLOAT  # its output, which is also the input that the last layer needs: once
    assert kept == {"": relu, "0": 0, "1": relu, "2": 0}  # the first input is the batch's, weights are theirs
    loss = BS * 3 * FLOAT + FLOAT  # log-softmax's output, and the sum of the weights of classes
    assert stats.totals.kept_by_loss == loss
    assert stats.totals.kept == relu + loss
    assert {row.name: row.output_bytes for row in stats.layers()} == {
        "": BS * 3 * FLOAT,
        "0": relu,
        "1": relu,
        "2": BS * 3 * FLOAT,
    }
    assert not stats.notes
    assert not stats.coverage.left_out


def test_a_conv_net_keeps_what_its_layers_need():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 4, 5), nn.Softmax(dim=1), nn.Dropout(0.5))
    batches = [(x, F.one_hot(y, 5).float()) for x, y in batches_for(3, 4, (3, 8, 8), 5)]
    stats = watch(model, batches, loss_func=F.mse_loss)
    image, pooled, out = 4 * 8 * 8 * 8 * FLOAT, 4 * 8 * 4 * 4, 4 * 5 * FLOAT
    expected = {
        "0": 0,  # its input is the batch's
        "1": image + 2 * 8 * FLOAT,  # its input, and mean and inverse deviation of 8 channels
        "2": image,  # its output
        "3": pooled * LONG,  # indices of the maxima; its input is the ReLU's output
        "4": 0,
        "5": pooled * FLOAT,  # its input, flattened without a copy
        "6": out,  # its output
        "7": out,  # the mask
    }
    assert {row.name: row.kept for row in stats.layers() if row.name} == expected
    assert stats.layers()[""].kept == sum(expected.values())
    assert stats.totals.kept_by_loss == out  # the prediction; the target is the batch's
    conv, norm, fc = 8 * 3 * 9 + 8, 2 * 8, 8 * 4 * 4 * 5 + 5
    of_params = {row.name: row.param_bytes for row in stats.layers() if row.param_bytes}
    assert of_params == {"0": conv * FLOAT, "1": norm * FLOAT, "5": fc * FLOAT}
    assert {row.name: row.grad_bytes for row in stats.layers() if row.grad_bytes} == of_params


@in_turn(
    ("make", "shape"),
    [
        (lambda: nn.TransformerEncoderLayer(12, 3, 20, batch_first=True), (5, 12)),
        (
            lambda: nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, norm_first=True, dropout=0.0),
            (5, 12),
        ),
        (lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(inplace=True)), (4, 9)),
        (lambda: nn.Sequential(nn.Linear(7, 7), nn.ReLU(inplace=True), nn.LogSoftmax(-1), nn.Tanh()), (7,)),
        (Blocks, (6,)),
    ],
    ids=["transformer", "norm first", "conv1d", "in place", "blocks"],
)
def test_the_sum_is_that_of_another_count(make, shape):
    torch.manual_seed(0)
    model = make()
    batches = [(x, x) for x, _ in batches_for(2, 4, shape)]

    def loss_of(pred, *target):
        return pred.square().mean()

    torch.manual_seed(1)
    stats = watch(model, batches, loss_func=loss_of)
    assert stats.totals.kept == kept_by_hand(model.train(), batches[0][0], loss_of) > 0


def test_half_precision_takes_half():
    half = [(x.half(), y) for x, y in batches_for()]
    whole, stats = (
        watch(mlp()),
        watch(mlp().half(), half, loss_func=lambda p, y: F.cross_entropy(p.float(), y)),
    )
    assert stats.layers()["1"].kept * 2 == whole.layers()["1"].kept
    assert stats.layers()["0"].param_bytes * 2 == whole.layers()["0"].param_bytes
    assert stats.layers()["0"].grad_bytes * 2 == whole.layers()["0"].grad_bytes


@pytest.mark.parametrize(
    ("opt_func", "of_params", "of_each"),
    [
        (torch.optim.SGD, 0, 0),
        (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 1, 0),
        (torch.optim.Adam, 2, FLOAT),  # two averages, and the number of its steps
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_the_optimizer_counts_what_it_keeps(opt_func, of_params, of_each):
    stats = watch(mlp(), opt_func=opt_func)
    for row in stats.layers():
        assert row.optimizer_bytes == of_params * row.param_bytes + of_each * 2 * (row.param_bytes > 0)
    assert stats.totals.optimizer_bytes == sum(row.optimizer_bytes for row in stats.layers())
    assert stats.totals.param_bytes == sum(p.numel() for p in mlp().parameters()) * FLOAT


def test_reading_the_optimizer_leaves_its_state_as_it_is():
    model = mlp()
    model[2].requires_grad_(False)
    stats = watch(model, opt_func=lambda p, lr: torch.optim.Adam(p, lr=lr))
    assert stats.layers()["2"].optimizer_bytes == stats.layers()["2"].grad_bytes == 0
    assert stats.layers()["2"].param_bytes > 0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.again(self.first(x))) * self.scale


def test_a_tied_weight_counts_once_under_its_first_name():
    rows = watch(Tied()).layers()
    assert rows["first"].param_bytes == rows["first"].grad_bytes == 36 * FLOAT
    assert rows["again"].param_bytes == rows["again"].grad_bytes == 0
    assert rows[""].param_bytes == 3 * FLOAT  # of its own


class Thrice(nn.Module):
    """Calls a layer three times."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.fc(self.fc(self.fc(x).sigmoid()).sigmoid()))


def test_all_calls_of_a_layer_count():
    rows = watch(Thrice()).layers()
    between = BS * 6 * FLOAT
    assert rows["fc"].calls == 3
    assert rows["fc"].output_bytes == rows["fc"].allocated == 3 * between
    assert rows["fc"].peak == between
    assert rows["fc"].kept == 0  # its inputs were saved by the sigmoid before, in the model itself
    assert rows[""].kept_self == 2 * between
    assert rows["head"].kept == between  # no sigmoid before


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.depth = nn.Linear(6, 6), 0

    def forward(self, x, left=2):
        x = self.fc(x).sigmoid()
        return self(x, left - 1) if left else x


def test_a_layer_that_calls_itself_counts_once():
    stats = watch(Recursive(), batches_for(n_classes=6))
    row, between = stats.layers()[""], BS * 6 * FLOAT
    assert row.calls == 3
    assert row.kept == 3 * between == stats.totals.kept - stats.totals.kept_by_loss
    assert row.allocated == 3 * between  # what the innermost leaves is what all leave


@dataclass
class Out:
    logits: torch.Tensor
    extra: dict


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y, _ = self.lstm(x[:, None].expand(-1, 5, -1))
        logits = self.head(y[:, -1])
        return Out(logits, {"mean": logits.mean(), "none": None, "twice": (logits * 2, 3)})


def test_outputs_in_any_structure_are_counted():
    rows = watch(Structured(), loss_func=lambda out, y: F.cross_entropy(out.logits, y)).layers()
    assert rows["lstm"].output_bytes == (BS * 5 * 4 + 2 * BS * 4) * FLOAT
    assert rows[""].output_bytes == (2 * BS * 3 + 1) * FLOAT


def test_sparse_gradients_count_what_is_stored():
    model = nn.Sequential(nn.Embedding(1000, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randint(0, 1000, (BS, 2), generator=g), torch.zeros(BS, dtype=torch.long))] * 2
    row = watch(model, batches).layers()["0"]
    assert row.grad_bytes == 2 * BS * (4 * FLOAT + LONG)  # a row for each word, and which it is
    assert row.param_bytes == 4000 * FLOAT


class Temporary(nn.Module):
    """Makes something large that is gone when it ends."""

    def __init__(self):
        super().__init__()
        self.large, self.head = nn.Linear(6, 100, bias=False), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) + self.large(x).mean()


def test_what_is_freed_in_a_forward_is_in_its_peak_and_not_in_what_it_allocates():
    rows = watch(Temporary()).layers()
    large, out = BS * 100 * FLOAT, BS * 3 * FLOAT
    assert rows["large"].allocated == rows["large"].peak == large
    assert rows[""].peak == large + out  # that of the head is alive meanwhile
    assert rows[""].allocated < rows[""].peak
    assert rows[""].kept == 0


def test_a_list_has_what_is_inside_of_it():
    stats = watch(Blocks())
    rows = stats.layers()
    assert rows["blocks"].calls == 0
    assert rows["blocks"].kept == sum(rows[f"blocks.{i}"].kept for i in range(4)) > 0
    assert rows["blocks.1"].kept == sum(row.kept_self for row in rows if row.name.startswith("blocks.1"))
    assert sum(row.kept_self for row in rows) + stats.totals.kept_by_loss == stats.totals.kept


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_frees_what_was_foretold(use_reentrant):
    plain = watch(Blocks())
    (advice,) = plain.advice
    assert (advice.layers, advice.type, advice.n_calls) == ("blocks.*", "Block", 4)
    assert advice.frees == plain.totals.kept - watch(Blocks(use_reentrant=use_reentrant)).totals.kept > 0
    assert 0 < advice.lowers < advice.frees  # in the backward one of them is there again


def test_only_chosen_layers_have_rows_and_all_bytes_a_place():
    all_rows, some = watch(Blocks()).layers(), watch(Blocks(), modules="blocks.?")
    assert [row.name for row in some.layers()] == [f"blocks.{i}" for i in range(4)]
    for row in some.layers():
        whole = [x for x in all_rows if x.name.startswith(row.name)]
        assert row.kept == row.kept_self == all_rows[row.name].kept
        assert row.param_bytes == sum(x.param_bytes for x in whole)
        assert row.depth == 0
    assert some.totals.param_bytes == sum(row.param_bytes for row in all_rows)

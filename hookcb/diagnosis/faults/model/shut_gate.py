"""gate.shut: a gate of an LSTM or GRU that its bias keeps closed."""

import torch
from torch import nn

from hookcb.core.torch_private import parameters_of
from hookcb.diagnosis.fault import Fault, Site, fault
from hookcb.diagnosis.run import Run
from hookcb.hooks.modules import named_modules

SHUT = 0.03  # a gate below this lets nothing through; same limit as for a saturated sigmoid
GATES = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new")}


@fault(
    "gate.shut",
    Site.MODULES,
    needs="batches model",
    leads_to="grad.* loss.* act.collapse update.too_small",
    subject="gates",
)
class ShutGate(Fault):
    """A gate of an LSTM or GRU that its bias keeps closed.

    Formula: median over units of sigmoid(bias) below 0.03; above 0.97 for the update gate of a GRU. A large
    positive bias of the forget gate, which keeps it open, is usual.

    Source: Jozefowicz et al., An Empirical Exploration of Recurrent Network Architectures, 2015.
    """

    headline = "A gate of a recurrent layer stays closed"
    passed = "closed gates"

    def on_model(self, run: Run) -> None:
        for name, m in named_modules(run.loop.model).items():
            if isinstance(m, nn.LSTM | nn.GRU) and m.bias and "bias_ih_l0" in parameters_of(m):
                self._see_gates(name, m)

    def _see_gates(self, name: str, m: nn.LSTM | nn.GRU) -> None:
        title, gates = name or type(m).__name__, GATES.get(type(m).__name__, GATES["LSTM"])
        for layer in range(m.num_layers):
            bias = getattr(m, f"bias_ih_l{layer}").detach() + getattr(m, f"bias_hh_l{layer}").detach()
            for gate, part in zip(gates, bias.chunk(len(gates)), strict=True):
                open_ = torch.sigmoid(part.float()).median().item()
                if gate == "update":  # in a GRU it keeps the old state
                    open_ = 1 - open_
                if open_ < SHUT and gate not in ("cell", "new"):
                    self.see(
                        f"The bias of the {gate} gate of {title} keeps it shut: half of its units let less "
                        f"than {open_:.1g} through (limit {SHUT:g}), so nothing is remembered or learned "
                        "there.",
                        at=name,
                        param=f"{name}.bias_ih_l{layer}" if name else f"bias_ih_l{layer}",
                        value=open_,
                        causes=(f"the bias of the {gate} gate begins at a large negative number",),
                        next_steps=("Set the bias of the forget gate to 1, and of the others to 0",),
                    )

"""Finds dead experts: those of a mixture that have had no token for many steps, and so learn nothing.

In one step an expert may have no token by chance. So an expert counts as dead after `STEPS` steps in a row without
one. Skipped updates are not counted. The count begins again when a run resumes.
"""

import numpy as np

from models.sizes import ModelSizes

STEPS = 100  # in a row
NAMED = 8  # experts of a layer that a sentence names; it only counts the others


class DeadExperts:
  """Counts the steps in which experts have had no token.

  Attributes:
    dead: [blocks with experts, experts], which experts are dead now.
  """

  def __init__(self, sizes: ModelSizes):
    self.sizes = sizes
    count = sizes.experts.count if sizes.experts else 1
    self.waiting = np.zeros((sizes.mixtures, count), np.int64)  # steps since the last token
    self.named = np.zeros(self.waiting.shape, bool)  # whether a sentence has named the expert

  @property
  def dead(self) -> np.ndarray:
    return self.waiting >= STEPS

  def after(self, load: np.ndarray) -> list[str]:
    """Takes the loads of a step, in the form of `dead`. Returns a sentence for each layer in which experts died now.

    No expert is named twice. With adapters the routers are not trained, so nothing can be done, and there is no
    sentence.
    """
    self.waiting = np.where(load > 0, 0, self.waiting + 1)
    new = self.dead & ~self.named
    self.named |= new
    if self.sizes.lora:
      return []
    return [self._sentence(int(layer), np.flatnonzero(new[layer])) for layer in np.flatnonzero(new.any(axis=1))]

  def _sentence(self, layer: int, experts: np.ndarray) -> str:
    c, names = self.sizes, ", ".join(map(str, experts[:NAMED]))
    which = f"expert {names}" if len(experts) == 1 else f"experts {names}"
    if len(experts) > NAMED:
      which += f" and {len(experts) - NAMED} more"
    assert c.experts is not None
    if c.experts.has_bias:
      fix = f"raise model.router_bias_rate={c.experts.router_bias_rate:g}"
    else:
      fix = f"raise model.router_aux={c.experts.router_aux:g}, or use model.router='sigmoid_bias'"
    return (
      f"{which} of layer {c.experts.layer_of(layer)}, counted from 0, had no token in the last {STEPS} steps; {fix}"
    )

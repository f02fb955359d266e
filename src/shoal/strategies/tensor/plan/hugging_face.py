"""What Hugging Face models say themselves about how they may be split."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from shoal.strategies.tensor.plan.tensor_plan import Style

_STYLES = {
    "colwise": Style.COLUMN,
    "colwise_gather_output": Style.COLUMN,
    "rowwise": Style.ROW,
    "embedding_rowwise": Style.VOCABULARY,
}


def certified(module: nn.Module) -> dict[str, Style]:
    """Layers that a model's own ``_tp_plan`` splits, in the styles that are known here."""
    found: dict[str, Style] = {}
    for prefix, part in module.named_modules():
        plan = getattr(part, "_tp_plan", None)
        if isinstance(plan, dict) and plan:
            names = [name for name, _ in part.named_modules()]
            for pattern, text in plan.items():
                style = _STYLES.get(str(text))
                if style is None:
                    continue
                for name in names:
                    if fnmatchcase(name, pattern):
                        found[f"{prefix}.{name}" if prefix else name] = style
    return found

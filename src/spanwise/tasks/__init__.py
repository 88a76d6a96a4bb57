"""What to train on: an embedded task with its tiny warm-started model, or a model and a dataset by name."""

from spanwise.layout import Layout
from spanwise.recipe import SCRIPT, Recipe, own_layout
from spanwise.tasks.digits import DIGITS_LAYOUT, Difficulty, held_out_problems, is_refusal
from spanwise.tasks.digits_long import LONG_LAYOUT
from spanwise.tasks.digits_twice import TWICE_LAYOUT
from spanwise.tasks.fields import Fields, held_out_field_problems
from spanwise.tasks.hub import LAYOUTS, load_task
from spanwise.tasks.task import CHAIN_LAYOUTS, Task, digits_task, fields_task
from spanwise.tasks.tiny import build_fields_tokenizer, build_model, build_tokenizer
from spanwise.tasks.warm_cache import default_cache_folder
from spanwise.tasks.warm_start import Phase, Start, WarmStartSettings, warm_start

_LAYOUTS = {**CHAIN_LAYOUTS, **LAYOUTS}


def task_layout(recipe: Recipe) -> Layout:
    """The blocks of a recipe's task, where the recipe names none; a script's run has those that it names.

    Example:
        >>> from spanwise.recipe import load
        >>> task_layout(load(None)).names
        ('solution', 'confidence')
    """
    named = own_layout(recipe) if recipe.task == SCRIPT else None
    if named is not None:
        return named
    return Fields("independent", recipe.fields).layout if recipe.task == "fields" else _LAYOUTS[recipe.task]


__all__ = [
    "DIGITS_LAYOUT", "LONG_LAYOUT", "TWICE_LAYOUT", "Difficulty", "Fields", "Phase", "Start", "Task", "WarmStartSettings",
    "build_fields_tokenizer", "build_model", "build_tokenizer", "default_cache_folder", "digits_task", "fields_task",
    "held_out_field_problems", "held_out_problems", "is_refusal", "load_task", "task_layout", "warm_start",
]  # fmt: skip

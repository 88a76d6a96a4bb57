"""Tasks to train on: an embedded task with a tiny model, or a model and a dataset of the user."""

from spanwise.layout import Layout
from spanwise.recipe import SCRIPT, Recipe
from spanwise.tasks.digits import DIGITS_LAYOUT
from spanwise.tasks.embedded import Start, Task, embedded
from spanwise.tasks.fields import Fields
from spanwise.tasks.hub import LAYOUTS, load_task
from spanwise.tasks.warm_start import Phase, WarmStartSettings, digits_task, warm_start


def task_start(recipe: Recipe) -> Start | Fields | None:
    """Return the name or settings of the warm start of a recipe's task. None for tasks without one."""
    start_by_task: dict[str, Start | Fields] = {
        "digits": recipe.start, "digits_twice": "twice", "digits_long": "long", "fields": Fields(recipe.fields),
        "invoices": "invoices",
    }  # fmt: skip
    return start_by_task.get(recipe.task)


def task_layout(recipe: Recipe) -> Layout:
    """Return the default blocks of a recipe's task. For a user's own script: the blocks in the recipe.

    Example:
        >>> from spanwise.recipe import load
        >>> task_layout(load(None)).names
        ('solution', 'confidence')
    """
    return task_shape(recipe)[0]


def task_shape(recipe: Recipe) -> tuple[Layout, int]:
    """Return the default blocks of a recipe's task, and the largest number of tokens of a completion."""
    if (task_warm_start := task_start(recipe)) is not None:
        embedded_task = embedded(task_warm_start)
        return embedded_task.layout, recipe.max_completion_length or embedded_task.longest
    layout = recipe.own_layout if recipe.task == SCRIPT else None
    return layout or LAYOUTS[recipe.task], recipe.max_completion_length or 4096


__all__ = [
    "DIGITS_LAYOUT", "Fields", "Phase", "Start", "Task", "WarmStartSettings", "digits_task", "load_task", "task_layout",
    "warm_start",
]  # fmt: skip

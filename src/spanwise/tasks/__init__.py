"""What to train on: the embedded digit chain with its tiny warm-started model, or a model and a dataset by name."""

from spanwise.tasks.digits import DIGITS_LAYOUT, Difficulty, held_out_problems, is_refusal
from spanwise.tasks.digits_long import LONG_LAYOUT
from spanwise.tasks.digits_twice import TWICE_LAYOUT
from spanwise.tasks.hub import LAYOUTS, load_task
from spanwise.tasks.task import Task, digits_task
from spanwise.tasks.tiny import build_model, build_tokenizer
from spanwise.tasks.warm_start import Phase, Start, WarmStartSettings, default_cache_folder, warm_start

#: The blocks of each task, where a recipe names none.
TASK_LAYOUTS = {"digits": DIGITS_LAYOUT, "digits_twice": TWICE_LAYOUT, "digits_long": LONG_LAYOUT, **LAYOUTS}

__all__ = [
    "DIGITS_LAYOUT",
    "LONG_LAYOUT",
    "TASK_LAYOUTS",
    "TWICE_LAYOUT",
    "Difficulty",
    "Phase",
    "Start",
    "Task",
    "WarmStartSettings",
    "build_model",
    "build_tokenizer",
    "default_cache_folder",
    "digits_task",
    "held_out_problems",
    "is_refusal",
    "load_task",
    "warm_start",
]

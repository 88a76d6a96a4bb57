"""Faults that cannot concern spanwise: number, where it was seen and what happened, and why it cannot happen here."""

NOT_OURS = [
    (
        26,
        "verl-project/verl#3960",
        "Tool calls were cleared, and training rendered another prompt than the one that was sampled from.",
        "Messages are not rendered here: an engine gives the ids that were sampled, and f24 holds that they stay as they are.",
    ),
    (
        34,
        "NVIDIA-NeMo/Megatron-Bridge#3927",
        "A chat template without `{% generation %}` gave a mask that covered everything.",
        "No template is asked for a mask: the engine says what was sampled, and f31 holds that another mask is refused.",
    ),
]

"""Nothing here is a test, and `verl_on_cpu` changes the process that imports it."""

collect_ignore = ["run_verl.py", "verl_on_cpu.py"]

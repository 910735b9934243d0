"""One model on several devices: what each device holds, and how the step runs on all of them (docs/parallel.md)."""

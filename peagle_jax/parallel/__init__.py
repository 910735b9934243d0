"""One model on several devices: what each holds, and how the step runs on all of them."""

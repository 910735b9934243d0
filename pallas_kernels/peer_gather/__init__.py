"""All-gather of small arrays between the GPUs of one process, by stores into each other's
memory."""

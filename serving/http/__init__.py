"""HTTP: OpenAI's routes, metrics and health, beside gRPC and over the same frontend."""

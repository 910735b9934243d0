"""Training: source text -> target model -> its continuations -> draft heads (`peagle-train`)."""

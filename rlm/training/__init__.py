"""Training: config and algorithms, advantages, batches, log-probabilities, loss, state,
processes, doctor, SFT."""

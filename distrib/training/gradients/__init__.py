"""How gradients are averaged on CPU hosts, and with fewer bytes anywhere: a communication hook of DDP."""

"""Training strategies: all-reduce, local SGD, Horovod, parameter servers."""

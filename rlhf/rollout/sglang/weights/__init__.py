"""How a weight sync reaches the parameters of SGLang's schedulers."""

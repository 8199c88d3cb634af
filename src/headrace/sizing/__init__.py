"""How many bytes a model has, from its config.json alone: no weights, no torch. Knows no machine and no plan.

`counts` knows what numbers a config can have, `fields` reads configs, `outline` lists tensors, `decoders`, `classic`
and `towers` know the families of models, `quantized` the ways to store a matrix in fewer bits, `stored` reads a
checkpoint's headers instead, `running` what one token costs, `shape` puts it together for the planner.
"""

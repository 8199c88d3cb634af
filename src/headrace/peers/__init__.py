"""What vLLM and SGLang would do with a model: which bytes leave the GPU under their rules, and which flags fit.

`layout` has the parameters as they hold them, `vllm` and `sglang` their rules, `recommend` chooses flags,
`commandline` reads one, `review` says what it would do. Their rules are facts about them, not ours. Starts nothing.
"""

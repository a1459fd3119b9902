"""Models: from files on disk to a forward pass over one stage of the pipeline.

    resolve   gguf, gguf_tokenizer      a name -> a Hugging Face directory
    config    shard                     what the model is, and which part a rank holds
    weights   fingerprint   linear      tensors out of the files, packed for the device
    llama     attention   rope   batch   kv      the forward pass over paged keys and values
    tokenizer   detokenize              text to ids and back

Import from the modules: `config`, `shard`, `fingerprint`, `resolve`, `tokenizer` and `detokenize` do not load torch.
"""

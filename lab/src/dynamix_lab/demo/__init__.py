"""`dynamix demo`: one real training job on an emulated uneven cluster, under one policy after the other."""

"""`dynamix bench quality`: what an adaptive batch does to the model, at equal samples."""

"""`dynamix bench decisions`: every policy's decisions under another revision, asked again under this one."""

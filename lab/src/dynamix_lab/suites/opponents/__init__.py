"""`dynamix bench opponents`: dynamix beside what a practitioner would pick, tuned as well."""

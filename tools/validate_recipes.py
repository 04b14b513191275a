"""Validates recipes with the Python package `jsonschema`, which knows nothing of Taper.

    python tools/validate_recipes.py docs/schema.json < recipes.json

Standard input is one JSON object: names of recipes with their content. Standard output is one: for every recipe that the schema
refuses, its name with what is wrong. The schema itself is checked first. The test `schema` of the crate `taper` calls it.
"""
import json
import sys

from jsonschema import Draft202012Validator


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        schema = json.load(file)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    refused = {}
    for name, recipe in json.load(sys.stdin).items():
        errors = sorted(validator.iter_errors(recipe), key=lambda error: list(map(str, error.path)))
        if errors:
            refused[name] = [f"{'.'.join(map(str, e.path)) or '(root)'}: {e.message[:200]}" for e in errors]
    json.dump(refused, sys.stdout, indent=1)


main()

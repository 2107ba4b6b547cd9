"""Describes a set in Croissant 1.0, the vocabulary of MLCommons for data sets, as JSON-LD.

The format: docs.mlcommons.org/croissant/docs/croissant-spec.html.

It names the file of rows with its hash, and every column that has one type in all rows.
"""

from __future__ import annotations

import json
from typing import Any

from controller.preflight.dataset.card import Card

_TYPES = {"text": "sc:Text", "integer": "sc:Integer", "number": "sc:Float", "true or false": "sc:Boolean"}
_CONTEXT: dict[str, Any] = {
    "@language": "en", "@vocab": "https://schema.org/", "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/", "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/", "citeAs": "cr:citeAs", "column": "cr:column", "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"}, "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"}, "extract": "cr:extract", "field": "cr:field",
    "fileProperty": "cr:fileProperty", "fileObject": "cr:fileObject", "fileSet": "cr:fileSet", "format": "cr:format",
    "includes": "cr:includes", "isLiveDataset": "cr:isLiveDataset", "jsonPath": "cr:jsonPath", "key": "cr:key",
    "md5": "cr:md5", "parentField": "cr:parentField", "path": "cr:path", "recordSet": "cr:recordSet",
    "references": "cr:references", "regex": "cr:regex", "repeated": "cr:repeated", "replace": "cr:replace",
    "separator": "cr:separator", "source": "cr:source", "subField": "cr:subField", "transform": "cr:transform",
}  # fmt: skip


def croissant(name: str, card: Card, file_name: str, file: dict[str, Any]) -> str:
    """The description of a set in one file of JSON Lines. file: its `bytes` and `sha256`."""
    fields = []
    for column, kinds in card.columns.items():
        known = [kind for kind in kinds if kind != "null"]
        if len(known) == 1 and known[0] in _TYPES:
            fields.append(
                {
                    "@type": "cr:Field", "@id": f"rows/{column}", "name": column, "dataType": _TYPES[known[0]],
                    "source": {"fileObject": {"@id": file_name}, "extract": {"column": column}},
                }
            )  # fmt: skip
    page = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "name": name,
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "description": f"{card.num_rows} rows, cleaned by areal-like data clean; manifest.json has sources and stages.",
        "distribution": [
            {
                "@type": "cr:FileObject", "@id": file_name, "name": file_name, "contentUrl": file_name,
                "contentSize": f"{file['bytes']} B", "encodingFormat": "application/jsonlines",
                "sha256": file["sha256"],
            }
        ],
        "recordSet": [{"@type": "cr:RecordSet", "@id": "rows", "name": "rows", "field": fields}],
    }  # fmt: skip
    return json.dumps(page, indent=2, ensure_ascii=False) + "\n"

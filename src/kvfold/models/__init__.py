"""All that kvfold knows about a model's insides, and how models are loaded."""

from kvfold.home import DEFAULT_NAME, DefaultStatus, default_path, default_status, kvfold_home
from kvfold.models.anatomy import Anatomy, LayerAnatomy, anatomy_of
from kvfold.models.angles import angles
from kvfold.models.default import ensure_default
from kvfold.models.fingerprint import (
    differing_facts,
    differing_shapes,
    fingerprint,
    fingerprint_facts,
    shape_facts,
)
from kvfold.models.frozen import frozen
from kvfold.models.home import Progress
from kvfold.models.loading import load_config, load_model, skeleton
from kvfold.models.parts import (
    attention_module,
    base_model,
    decoder_layers,
    final_norm,
    input_norm,
    key_norm,
    lm_head,
    missing_parts,
    output_projection,
    query_norm,
    rotary,
    text_config,
)
from kvfold.models.placement import parse_device, parse_dtype
from kvfold.models.probe import RopeFinding, probe_rope
from kvfold.models.projections import (
    HeadShape,
    head_shape,
    key_weight,
    output_weight,
    project,
    projection_bias,
    projection_weight,
    query_weight,
    value_weight,
)
from kvfold.models.rope import RopeAnatomy

__all__ = [
    "DEFAULT_NAME",
    "Anatomy",
    "DefaultStatus",
    "HeadShape",
    "LayerAnatomy",
    "Progress",
    "RopeAnatomy",
    "RopeFinding",
    "anatomy_of",
    "angles",
    "attention_module",
    "base_model",
    "decoder_layers",
    "default_path",
    "default_status",
    "differing_facts",
    "differing_shapes",
    "ensure_default",
    "final_norm",
    "fingerprint",
    "fingerprint_facts",
    "frozen",
    "head_shape",
    "input_norm",
    "key_norm",
    "key_weight",
    "kvfold_home",
    "lm_head",
    "load_config",
    "load_model",
    "missing_parts",
    "output_projection",
    "output_weight",
    "parse_device",
    "parse_dtype",
    "probe_rope",
    "project",
    "projection_bias",
    "projection_weight",
    "query_norm",
    "query_weight",
    "rotary",
    "shape_facts",
    "skeleton",
    "text_config",
    "value_weight",
]

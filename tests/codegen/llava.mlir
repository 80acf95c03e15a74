builtin.module {
  sec.graph "model" optional ["pixel_values"] labels "labels" widths "own" {
    sec.symbol "B" kind "rows" key "input_ids" dim 0
    sec.symbol "n_pixel_values" kind "rows" key "pixel_values" dim 0
    sec.symbol "S" kind "width" key "input_ids" dim 1
    %0 = sec.key "input_ids" pads ["1 right 0"] : !sec.tensor<[B, S], i64>
    %1 = sec.key "labels" pads ["1 right -100"] : !sec.tensor<[B, S], i64>
    %2 = sec.key "attention_mask" pads ["1 right 0"] : !sec.tensor<[B, S], i64>
    %3 = sec.key "pixel_values" optional : !sec.tensor<[n_pixel_values, 3, 32, 32], f32>
    sec.pattern when [] share "0.5469" {B = 1.000000e+00 : f64, n_pixel_values = 0.000000e+00 : f64, S = 12.828571428571429 : f64}
    sec.pattern when ["pixel_values"] share "0.4531" {B = 1.000000e+00 : f64, n_pixel_values = 1.000000e+00 : f64, S = 27.448275862068964 : f64}
    sec.block "model.language_model.embed_tokens" class "Embedding" params 5760 trainable 5760 component "model.language_model" layers 2 at "modeling_llava.py:239" {bytes = 23040 : i64, trainable_bytes = 23040 : i64}
    sec.block "model.vision_tower" class "CLIPVisionModel" params 23936 trainable 23936 component "model.vision_tower" layers 2 at "modeling_clip.py:601" {bytes = 95744 : i64, trainable_bytes = 95744 : i64}
    sec.block "model.multi_modal_projector" class "LlavaMultiModalProjector" params 3936 trainable 3936 component "model.multi_modal_projector" layers 0 at "modeling_llava.py:103" {bytes = 15744 : i64, trainable_bytes = 15744 : i64}
    sec.block "model.language_model" class "LlamaModel" params 47472 trainable 47472 component "model.language_model" layers 2 at "modeling_llama.py:353" {bytes = 189888 : i64, trainable_bytes = 189888 : i64}
    sec.block "lm_head" class "Linear" params 5760 trainable 5760 component "lm_head" layers 0 at "modeling_llava.py:367" {bytes = 23040 : i64, trainable_bytes = 23040 : i64}
    sec.case "c0" when [] {
      %4 = sec.input "input_ids" : !sec.tensor<[B, S], i64>
      %5 = sec.input "labels" : !sec.tensor<[B, S], i64>
      %6 = sec.input "attention_mask" : !sec.tensor<[B, S], i64>
      %7 = sec.call "model.language_model.embed_tokens" (%4) args "$0" outs [""] at "modeling_llava.py:239" {flops = "0", saved = "8*B*S", ops = 1 : i64, cost = "counted"} : !sec.tensor<[B, S, 48], f32, grad>
      %8 = sec.call "model.language_model" (%6, %7) args "attention_mask=$0, position_ids=None, past_key_values=None, inputs_embeds=$1" outs [".last_hidden_state"] at "modeling_llava.py:259" {flops = "384*B*S*S + 82944*B*S", saved = "7348*B*S + 96*S", ops = 104 : i64, cost = "counted"} : !sec.tensor<[B, S, 48], f32, grad>
      %9 = sec.call "lm_head" (%8) args "$0" outs [""] at "modeling_llava.py:367" {flops = "11520*B*S", saved = "192*B*S", ops = 2 : i64, cost = "counted"} : !sec.tensor<[B, S, 120], f32, grad>
      %10 = sec.glue "aten.constant_pad_nd.default" (%5) args "$0, [0, 1], -100.0" at "loss_utils.py:65" : !sec.tensor<[B, "S + 1"], i64>
      %11 = sec.glue "aten.slice.Tensor" (%10) args "$0, 1, 1, 9223372036854775807" at "loss_utils.py:66" : !sec.tensor<[B, S], i64>
      %12 = sec.glue "aten.clone.default" (%11) args "$0, memory_format=torch.contiguous_format" at "loss_utils.py:66" : !sec.tensor<[B, S], i64>
      %13 = sec.glue "aten.reshape.default" (%9) args "$0, [-1, 120]" at "loss_utils.py:69" : !sec.tensor<["B*S", 120], f32, grad>
      %14 = sec.glue "aten.reshape.default" (%12) args "$0, [-1]" at "loss_utils.py:70" : !sec.tensor<["B*S"], i64>
      %15 = sec.glue "aten._log_softmax.default" (%13) args "$0, 1, False" at "loss_utils.py:42" : !sec.tensor<["B*S", 120], f32, grad>
      %16, %17 = sec.glue "aten.nll_loss_forward.default" (%15, %14) args "$0, $1, None, 1, -100" at "loss_utils.py:42" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32, grad>
      sec.return (%16)
    }
    sec.case "c1" when ["pixel_values"] {
      %18 = sec.input "input_ids" : !sec.tensor<[B, S], i64>
      %19 = sec.input "labels" : !sec.tensor<[B, S], i64>
      %20 = sec.input "pixel_values" : !sec.tensor<[n_pixel_values, 3, 32, 32], f32>
      %21 = sec.input "attention_mask" : !sec.tensor<[B, S], i64>
      %22 = sec.call "model.language_model.embed_tokens" (%18) args "$0" outs [""] at "modeling_llava.py:239" {flops = "0", saved = "8*B*S", ops = 1 : i64, cost = "counted"} : !sec.tensor<[B, S, 48], f32, grad>
      %23 = sec.call "model.vision_tower" (%20) args "$0, return_dict=True, output_hidden_states=-1" outs [".last_hidden_state"] at "modeling_llava.py:156" {flops = "827648*n_pixel_values", saved = "82880*n_pixel_values", ops = 38 : i64, cost = "counted"} : !sec.tensor<[n_pixel_values, 17, 32], f32, grad>
      %24 = sec.glue "aten.slice.Tensor" (%23) args "$0, 1, 1, 9223372036854775807" at "modeling_llava.py:167" : !sec.tensor<[n_pixel_values, 16, 32], f32, grad>
      %25 = sec.call "model.multi_modal_projector" (%24) args "$0" outs [""] at "modeling_llava.py:175" {flops = "122880*n_pixel_values", saved = "8192*n_pixel_values", ops = 3 : i64, cost = "counted"} : !sec.tensor<[n_pixel_values, 16, 48], f32, grad>
      %26 = sec.glue "aten.reshape.default" (%25) args "$0, [16*n_pixel_values, 48]" at "modeling_llava.py:253" : !sec.tensor<["16*n_pixel_values", 48], f32, grad>
      %27 = sec.glue "aten.eq.Scalar" (%18) args "$0, 119" at "modeling_llava.py:205" : !sec.tensor<[B, S], bool>
      %28 = sec.glue "aten.sum.default" (%27) args "$0" at "modeling_llava.py:207" : !sec.tensor<[], i64>
      %29 = sec.glue "aten.unsqueeze.default" (%27) args "$0, -1" at "modeling_llava.py:209" : !sec.tensor<[B, S, 1], bool>
      %30 = sec.glue "aten.mul.Tensor" (%28) args "$0, 48" at "modeling_llava.py:211" : !sec.tensor<[], i64>
      %31 = sec.glue "aten.eq.Scalar" (%30) args "$0, 768*n_pixel_values" at "modeling_llava.py:211" : !sec.tensor<[], bool>
      %32 = sec.glue "aten._is_all_true.default" (%31) args "$0" at "import_utils.py:1993" : !sec.tensor<[], bool>
      sec.guard (%32) equals "True" at "import_utils.py:1993"
      %33 = sec.glue "aten.masked_scatter.default" (%22, %29, %26) args "$0, $1, $2" at "modeling_llava.py:257" : !sec.tensor<[B, S, 48], f32, grad>
      %34 = sec.call "model.language_model" (%21, %33) args "attention_mask=$0, position_ids=None, past_key_values=None, inputs_embeds=$1" outs [".last_hidden_state"] at "modeling_llava.py:259" {flops = "384*B*S*S + 82944*B*S", saved = "7348*B*S + 96*S", ops = 104 : i64, cost = "counted"} : !sec.tensor<[B, S, 48], f32, grad>
      %35 = sec.call "lm_head" (%34) args "$0" outs [""] at "modeling_llava.py:367" {flops = "11520*B*S", saved = "192*B*S", ops = 2 : i64, cost = "counted"} : !sec.tensor<[B, S, 120], f32, grad>
      %36 = sec.glue "aten.constant_pad_nd.default" (%19) args "$0, [0, 1], -100.0" at "loss_utils.py:65" : !sec.tensor<[B, "S + 1"], i64>
      %37 = sec.glue "aten.slice.Tensor" (%36) args "$0, 1, 1, 9223372036854775807" at "loss_utils.py:66" : !sec.tensor<[B, S], i64>
      %38 = sec.glue "aten.clone.default" (%37) args "$0, memory_format=torch.contiguous_format" at "loss_utils.py:66" : !sec.tensor<[B, S], i64>
      %39 = sec.glue "aten.reshape.default" (%35) args "$0, [-1, 120]" at "loss_utils.py:69" : !sec.tensor<["B*S", 120], f32, grad>
      %40 = sec.glue "aten.reshape.default" (%38) args "$0, [-1]" at "loss_utils.py:70" : !sec.tensor<["B*S"], i64>
      %41 = sec.glue "aten._log_softmax.default" (%39) args "$0, 1, False" at "loss_utils.py:42" : !sec.tensor<["B*S", 120], f32, grad>
      %42, %43 = sec.glue "aten.nll_loss_forward.default" (%41, %40) args "$0, $1, None, 1, -100" at "loss_utils.py:42" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32, grad>
      sec.return (%42)
    }
  }
}

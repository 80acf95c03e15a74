// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// A mean over the labels that are not ignored: the numerator is the sum over a micro-batch, the divisor a count over the whole batch. The
// weight 0.5 goes to the coefficient.

sec.graph "lm" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.block "lm" class "LM" params 10 trainable 10
  sec.case "all" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %labels = sec.input "labels" : !sec.tensor<[B, S], i64>
    %logits = sec.call "lm" (%ids) args "$0" outs [".logits"] : !sec.tensor<[B, S, 16], f32, grad>
    %flat = sec.glue "aten.view.default" (%logits) args "$0, [B*S, 16]" : !sec.tensor<["B*S", 16], f32, grad>
    %wanted = sec.glue "aten.view.default" (%labels) args "$0, [B*S]" : !sec.tensor<["B*S"], i64>
    // CHECK: %scores = sec.glue "aten._log_softmax.default"
    // CHECK-NEXT: [[SUM:%[0-9]+]], {{%[0-9]+}} = sec.glue "aten.nll_loss_forward.default" (%scores, %wanted) args "$0, $1, None, 2, -100"
    // CHECK-NEXT: [[KEPT:%[0-9]+]] = sec.glue "aten.ne.Scalar" (%wanted) args "$0, -100"
    // CHECK-NEXT: [[COUNT:%[0-9]+]] = sec.glue "aten.sum.default" ([[KEPT]])
    // CHECK-NEXT: [[LEAF:%[0-9]+]] = sec.leaf "loss.count" ([[COUNT]])
    // CHECK-NEXT: [[SHARE:%[0-9]+]] = sec.glue "aten.reciprocal.default" ([[LEAF]])
    // CHECK-NEXT: [[HALF:%[0-9]+]] = sec.glue "aten.mul.Tensor" ([[SHARE]]) args "$0, 0.5"
    // CHECK-NEXT: sec.term "loss" ([[SUM]], [[HALF]]) at "model.py:4"
    // CHECK-NEXT: sec.return constant "0.0"
    %scores = sec.glue "aten._log_softmax.default" (%flat) args "$0, 1, False" : !sec.tensor<["B*S", 16], f32, grad>
    %mean, %weight = sec.glue "aten.nll_loss_forward.default" (%scores, %wanted) args "$0, $1, None, 1, -100" at "model.py:4" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    %half = sec.glue "aten.mul.Tensor" (%mean) args "$0, 0.5" : !sec.tensor<[], f32, grad>
    sec.return (%half)
  }
}

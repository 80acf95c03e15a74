// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// Label smoothing divides by the number of labels that are not ignored. Labels that a block returns all count: the mean over
// classes, which has the same labels, is guarded.

sec.graph "codes" {
  sec.symbol "B" kind "rows" key "image" dim 0
  sec.block "vq" class "Codes" params 10 trainable 0
  sec.block "lm" class "LM" params 10 trainable 10
  sec.case "all" when [] {
    %image = sec.input "image" : !sec.tensor<[B, 8], f32>
    %codes = sec.call "vq" (%image) args "$0" outs [""] : !sec.tensor<[B, 4], i64>
    %logits = sec.call "lm" (%image) args "$0" outs [""] : !sec.tensor<[B, 4, 16], f32, grad>
    %flat = sec.glue "aten.view.default" (%logits) args "$0, [4*B, 16]" : !sec.tensor<["4*B", 16], f32, grad>
    %wanted = sec.glue "aten.view.default" (%codes) args "$0, [4*B]" : !sec.tensor<["4*B"], i64>
    %scores = sec.glue "aten._log_softmax.default" (%flat) args "$0, 1, False" : !sec.tensor<["4*B", 16], f32, grad>
    %mean, %weight = sec.glue "aten.nll_loss_forward.default" (%scores, %wanted) args "$0, $1, None, 1, -100" at "model.py:4" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    %rows = sec.glue "aten.sum.dim_IntList" (%scores) args "$0, [1]" : !sec.tensor<["4*B"], f32, grad>
    %ignored = sec.glue "aten.eq.Scalar" (%wanted) args "$0, -100" : !sec.tensor<["4*B"], bool>
    %kept = sec.glue "aten.bitwise_not.default" (%ignored) args "$0" : !sec.tensor<["4*B"], bool>
    %total = sec.glue "aten.sum.default" (%rows) args "$0" : !sec.tensor<[], f32, grad>
    %count = sec.glue "aten.sum.default" (%kept) args "$0" : !sec.tensor<[], i64>
    %smooth = sec.glue "aten.div.Tensor" (%total, %count) args "$0, $1" at "model.py:4" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.sub.Tensor" (%mean, %smooth) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
    // CHECK: [[ENTRIES:%[0-9]+]] = sec.size "4*B"
    // CHECK-NEXT: [[SHARE:%[0-9]+]] = sec.glue "aten.reciprocal.default" ([[ENTRIES]])
    // CHECK-NEXT: sec.term "cross_entropy"
    // CHECK-NEXT: sec.term "ignored_labels"
    // CHECK-NEXT: [[ENTRIES:%[0-9]+]] = sec.size "4*B"
    // CHECK-NEXT: [[SHARE:%[0-9]+]] = sec.glue "aten.reciprocal.default" ([[ENTRIES]])
    // CHECK-NEXT: [[MINUS:%[0-9]+]] = sec.glue "aten.mul.Tensor" ([[SHARE]]) args "$0, -1.0"
    // CHECK-NEXT: sec.term "loss" (%total, [[MINUS]])
  }
}

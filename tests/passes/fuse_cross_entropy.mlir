// RUN: secc opt %s -p fuse-linear-loss --split-input-file | filecheck %s
// RUN: secc opt %s -p 'fuse-linear-loss{without="linear-cross-entropy"}' --split-input-file | filecheck %s --check-prefix OFF
// RUN: secc opt %s -p 'fuse-linear-loss{when="auto" cluster="local:2"}' --split-input-file | filecheck %s --check-prefix CPU

// The sum of label losses on a head's logits reads hidden states and the head's own weight; the head is called no more, and what is done to
// rows of logits is done to rows of hidden states.

// CHECK: sec.graph "shifted" attributes {fusions = ["linear-cross-entropy; head; model.py:9; "]}
// OFF: sec.graph "shifted" attributes {fusions = ["linear-cross-entropy; head; model.py:9; the rule linear-cross-entropy is off"]}
// CPU: sec.graph "shifted" attributes {fusions = ["fuse-linear-loss; all losses; ; on CPUs the operators take longer than the ops that they replace; --fuse puts them in"]}
sec.graph "shifted" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.block "body" class "Body" params 100 trainable 100
  // CHECK: sec.block "head" class "Linear" {{.*}} fused
  sec.block "head" class "Linear" params 320 trainable 320 {weight = !sec.tensor<[40, 8], f32, grad>}
  sec.case "c0" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %labels = sec.input "labels" : !sec.tensor<[B, S], i64>
    %h = sec.call "body" (%ids) args "$0" outs [""] : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK-NOT: sec.call "head"
    // OFF: sec.call "head"
    // CPU: sec.call "head"
    %y = sec.call "head" (%h) args "$0" outs [""] at "model.py:8" : !sec.tensor<[B, S, 40], f32, grad>
    %s = sec.glue "aten.slice.Tensor" (%y) args "$0, 1, 0, -1" : !sec.tensor<[B, "S - 1", 40], f32, grad>
    %rows = sec.glue "aten.reshape.default" (%s) args "$0, [-1, 40]" : !sec.tensor<["B*(S - 1)", 40], f32, grad>
    // CHECK: %[[l:.*]] = sec.glue "aten.slice.Tensor" (%{{.*}}) args "$0, 1, 1, 9223372036854775807"
    %t = sec.glue "aten.slice.Tensor" (%labels) args "$0, 1, 1, 9223372036854775807" : !sec.tensor<[B, "S - 1"], i64>
    %flat = sec.glue "aten.reshape.default" (%t) args "$0, [-1]" : !sec.tensor<["B*(S - 1)"], i64>
    %p = sec.glue "aten._log_softmax.default" (%rows) args "$0, 1, False" : !sec.tensor<["B*(S - 1)", 40], f32, grad>
    %n, %w = sec.glue "aten.nll_loss_forward.default" (%p, %flat) args "$0, $1, None, 2, -100" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    // CHECK: %[[h:.*]] = sec.glue "aten.slice.Tensor" (%h) args "$0, 1, 0, -1" at "model.py:9" : !sec.tensor<[B, "S - 1", 8], f32, grad>
    // CHECK: %[[w:.*]] = sec.param "head.weight" : !sec.tensor<[40, 8], f32, grad>
    // CHECK: %cross_entropy, %{{.*}} = sec.glue "secc.linear_cross_entropy" (%[[h]], %[[w]], %[[l]]) args "$0, $1, $2" at "model.py:9"
    // CHECK-NEXT: sec.term "loss" (%cross_entropy)
    sec.term "loss" (%n) at "model.py:9"
    sec.return constant "0.0"
  }
}

// -----

// A tied head in glue, smoothed labels, a mask: two terms with one coefficient become one, whose labels are left out where the mask is 0.

// CHECK: sec.graph "smoothed"
sec.graph "smoothed" {
  sec.symbol "N" kind "rows" key "x" dim 0
  sec.block "body" class "Body" params 100 trainable 100
  sec.case "c0" when [] {
    %x = sec.input "x" : !sec.tensor<[N, 8], f32>
    %labels = sec.input "labels" : !sec.tensor<[N], i64>
    %keep = sec.input "keep" : !sec.tensor<[N], bool>
    %h = sec.call "body" (%x) args "$0" outs [""] : !sec.tensor<[N, 8], f32, grad>
    // CHECK: %[[w:.*]] = sec.param "embedding.weight"
    %e = sec.param "embedding.weight" : !sec.tensor<[40, 8], f32, grad>
    %et = sec.glue "aten.t.default" (%e) args "$0" : !sec.tensor<[8, 40], f32, grad>
    %y = sec.glue "aten.mm.default" (%h, %et) args "$0, $1" : !sec.tensor<[N, 40], f32, grad>
    %p = sec.glue "aten._log_softmax.default" (%y) args "$0, -1, False" : !sec.tensor<[N, 40], f32, grad>
    %each, %z = sec.glue "aten.nll_loss_forward.default" (%p, %labels) args "$0, $1, None, 0, -100" : !sec.tensor<[N], f32, grad>, !sec.tensor<[], f32>
    %kept = sec.glue "aten.mul.Tensor" (%each, %keep) args "$0, $1" : !sec.tensor<[N], f32, grad>
    %n = sec.glue "aten.sum.default" (%kept) args "$0" : !sec.tensor<[], f32, grad>
    %q = sec.glue "aten.sum.dim_IntList" (%p) args "$0, [-1]" : !sec.tensor<[N], f32, grad>
    %m = sec.glue "aten.neg.default" (%q) args "$0" : !sec.tensor<[N], f32, grad>
    %i = sec.glue "aten.eq.Scalar" (%labels) args "$0, -100" : !sec.tensor<[N], bool>
    %f = sec.glue "aten.masked_fill.Scalar" (%m, %i) args "$0, $1, 0.0" : !sec.tensor<[N], f32, grad>
    %g = sec.glue "aten.mul.Tensor" (%f, %keep) args "$0, $1" : !sec.tensor<[N], f32, grad>
    %r = sec.glue "aten.sum.default" (%g) args "$0" : !sec.tensor<[], f32, grad>
    %size = sec.size "N" : !sec.tensor<[], f64>
    %a = sec.glue "aten.mul.Tensor" (%size) args "$0, 0.5" : !sec.tensor<[], f64>
    %b = sec.glue "aten.mul.Tensor" (%size) args "$0, 0.0125" : !sec.tensor<[], f64>
    // CHECK: %[[t:.*]] = sec.glue "aten.where.ScalarOther" (%keep, %labels) args "$0, $1, -100"
    // CHECK: sec.glue "secc.linear_cross_entropy" (%h, %[[w]], %[[t]]) args "$0, $1, $2, label_smoothing=0.5"
    // CHECK: sec.glue "aten.mul.Tensor" (%cross_entropy) args "$0, 2.0"
    // CHECK-NEXT: sec.term "nll"
    // CHECK-NEXT: sec.return
    sec.term "nll" (%n, %a) at "model.py:9"
    sec.term "smooth" (%r, %b) at "model.py:9"
    sec.return constant "0.0"
  }
}

// -----

// Something else needs the logits: the head stays, and the reason is noted with the place.

// CHECK: sec.graph "used" attributes {fusions = ["linear-cross-entropy; head; model.py:12; its logits are also used elsewhere: aten.pow.Tensor_Scalar is not part of a loss that an operator computes"]}
sec.graph "used" {
  sec.symbol "N" kind "rows" key "x" dim 0
  sec.block "head" class "Linear" params 320 trainable 320 {weight = !sec.tensor<[40, 8], f32, grad>, bias = !sec.tensor<[40], f32, grad>}
  sec.case "c0" when [] {
    %x = sec.input "x" : !sec.tensor<[N, 8], f32>
    %labels = sec.input "labels" : !sec.tensor<[N], i64>
    // CHECK: sec.call "head"
    %y = sec.call "head" (%x) args "$0" outs [""] at "model.py:8" : !sec.tensor<[N, 40], f32, grad>
    %p = sec.glue "aten._log_softmax.default" (%y) args "$0, 1, False" : !sec.tensor<[N, 40], f32, grad>
    %n, %w = sec.glue "aten.nll_loss_forward.default" (%p, %labels) args "$0, $1, None, 2, -100" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    %z = sec.glue "aten.pow.Tensor_Scalar" (%y) args "$0, 2" at "model.py:12" : !sec.tensor<[N, 40], f32, grad>
    %s = sec.glue "aten.sum.default" (%z) args "$0" : !sec.tensor<[], f32, grad>
    // CHECK: aten.nll_loss_forward.default
    sec.term "loss" (%n) at "model.py:9"
    sec.term "penalty" (%s) at "model.py:12"
    sec.return constant "0.0"
  }
}

// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// Segmentation ignores the label 255, which is no class: the weight of a label that does not count is not looked up.

sec.graph "segments" {
  sec.symbol "B" kind "rows" key "seg" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.case "all" when [] {
    // CHECK: [[KEPT:%[0-9]+]] = sec.glue "aten.ne.Scalar" (%seg) args "$0, 255"
    // CHECK-NEXT: [[CLASS:%[0-9]+]] = sec.glue "aten.mul.Tensor" (%seg, [[KEPT]])
    // CHECK-NEXT: [[WEIGHTS:%[0-9]+]] = sec.glue "aten.index.Tensor" (%weight, [[CLASS]])
    // CHECK-NEXT: [[COUNTED:%[0-9]+]] = sec.glue "aten.mul.Tensor" ([[WEIGHTS]], [[KEPT]])
    // CHECK-NEXT: [[TOTAL:%[0-9]+]] = sec.glue "aten.sum.default" ([[COUNTED]])
    // CHECK-NEXT: sec.leaf "loss.count" ([[TOTAL]])
    %seg = sec.input "seg" : !sec.tensor<[B], i64>
    %weight = sec.const "weight" : !sec.tensor<[5], f32>
    %scores = sec.call "net" (%seg) args "$0" outs [""] : !sec.tensor<[B, 5], f32, grad>
    %loss, %sum = sec.glue "aten.nll_loss_forward.default" (%scores, %seg, %weight) args "$0, $1, $2, 1, 255" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    sec.return (%loss)
  }
}
